#!/usr/bin/env bash
# Packs what the runs beside this folder need on a GPU machine without a network.
#
#   bash tests/gpu_runs/offline/pack.sh FOLDER KERNEL ...
#
# Started in the repository's root, after `make test` has made .venv. FOLDER gets
#   whl/              wheels for Python 3.12 of what images with torch, transformers and pytest lack
#   cutlass.tar.xz    the headers that kernels are compiled with
#   kernels.tar.xz    the named kernels for an H100 or H200, from OSTINATO_CACHE; what is missing
#                     there is compiled first (../parallel/run.py and others name what they launch)
#   commit            of the working tree
# Put what a run wants of vLLM beside them: vllm_site.tar.xz (../plugins/run.sh says what is in it).
# unpack.sh, sourced on the other machine, takes FOLDER from there.
set -eu
to=$(realpath -m "${1:?}")
shift
export OSTINATO_CACHE=${OSTINATO_CACHE:-$HOME/.cache/ostinato/kernels}
python=.venv/bin/python
site=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
platforms=$(for n in 2_28 2_27 2_24 2_17; do echo "--platform manylinux_${n}_x86_64"; done)
mkdir -p "$to/whl"
# shellcheck disable=SC2086
$python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp $platforms --platform manylinux2014_x86_64 -d "$to/whl" \
  annotated-doc annotated-types apache-tvm-ffi fastapi==0.136.3 httptools prometheus_client \
  pydantic==2.14.3 pydantic_core==2.50.4 starlette typing_inspection uvicorn 'xgrammar>=0.2.8,<0.3'
tar -C "$site" -c cutlass_library/__init__.py cutlass_library/source/include \
  "$(cd "$site" && echo nvidia_cutlass*.dist-info)" | xz -T0 >"$to/cutlass.tar.xz"
$python -m ostinato build --arch 90a --only "$@"
for kernel in "$@"; do
  find "$OSTINATO_CACHE" -maxdepth 1 -name "$kernel-sm_90a-*" -printf '%T@ %f\n' |
    sort -n | tail -n 1 | cut -d ' ' -f 2-
done | tar -C "$OSTINATO_CACHE" -c -T - | xz -T0 >"$to/kernels.tar.xz"
git describe --always --dirty --abbrev=40 --exclude='*' >"$to/commit"
du -sh "$to"
