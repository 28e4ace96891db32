# shellcheck shell=bash
# Takes what pack.sh has packed, on the machine without a network.
#
#   . tests/gpu_runs/offline/unpack.sh FOLDER
#
# Sourced in the root of a copy of the repository, whose python3 has torch. Afterwards `python3 -m
# ostinato` works, V is vLLM's unpacked site where FOLDER has vllm_site.tar.xz, and HF has the wheels.
# A second call on one machine unpacks nothing again.
kit=$(realpath "$1")
began=$SECONDS
# A copy's .git may know nothing of the commit, which the results must name. It is put back.
if [ -d .git ]; then
  rm -rf /tmp/git_away
  mv .git /tmp/git_away
  # shellcheck disable=SC2064
  trap "mv /tmp/git_away '$PWD/.git'" EXIT
fi
OSTINATO_COMMIT=$(cat "$kit/commit")
export OSTINATO_COMMIT OSTINATO_CACHE=/tmp/cache OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export V=/tmp/V HF=/tmp/site
mkdir -p "$V" "$HF" "$OSTINATO_CACHE"
if [ ! -e /tmp/.unpacked ]; then
  [ -f "$kit/vllm_site.tar.xz" ] && tar -xJf "$kit/vllm_site.tar.xz" -C "$V" &
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$HF" "$kit"/whl/*.whl &
  tar -xJf "$kit/cutlass.tar.xz" -C "$HF" &
  tar -xJf "$kit/kernels.tar.xz" -C "$OSTINATO_CACHE" &
  python3 -m pip install -q --no-index --no-build-isolation --no-deps -e .
  wait
  touch /tmp/.unpacked
fi
export PYTHONPATH=$HF
python3 -c "import ostinato.server, xgrammar" || exit 1
echo "unpacked: $((SECONDS - began)) s"
nvidia-smi -L
