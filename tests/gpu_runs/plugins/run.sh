#!/usr/bin/env bash
# Times the plug-ins for vLLM and transformers beside these alone on a GPU, and runs their tests.
#
#   V=FOLDER HF=FOLDER OUT=FOLDER bash tests/gpu_runs/plugins/run.sh PART ...
#
# Started in the repository's root. Parts, with the seconds they took on one H200:
#   build         44 kernels of ours; 40 on 16 cores with an empty cache, else 5
#   step          vLLM: steps, texts of the 8B shape, kernels' profile                      200
#   long          vLLM: attention at 4096 x 128, 16 layers                                  137
#   texts         vLLM: tiny-llama                                                          >90
#   ranks         vLLM: two GPUs                                                            200
#   transformers  accelerate beside transformers, 8 layers                                  150
#   pages         tests/compat on the GPU, the snippets of the documentation among them      87
#   vllm_tests    tests/compat/vllm on the GPU, with vLLM's classes: caches of both layouts,
#                 8 bits                                                                     30
#   serve         docs/integrations/vllm.md as far as it goes: vllm serve examples/tiny-llama
#                                                                                            90
#
# V    vLLM's unpacked site, of whose folders vllm_0.33.0, deps and stubs are on PYTHONPATH, before
#      what is there already: CUTLASS's headers, without which nothing can be compiled. Its
#      processes must see transformers below 5.21, and the compressed-tensors 0.17 in deps.
# HF   for the parts transformers and pages: a folder of transformers 5.23, compressed-tensors,
#      loguru and pytest; serve takes uvicorn and httptools from it, where it has them.
# OUT  for the results: vllm_plugin_PART.json and a log for each of vLLM's parts, which merge.py
#      joins, transformers.json, serve_log.txt.
# The package is installed (vLLM must find its entry point); OSTINATO_CACHE is the folder of
# kernels that are already built. LIMIT is a part's limit in seconds, ARGS further options.
set -u
: "${V:?}" "${OUT:?}"
HF=${HF:-}
S=$V/vllm_0.33.0:$V/deps:$V/stubs${PYTHONPATH:+:$PYTHONPATH}
H=$HF${PYTHONPATH:+:$PYTHONPATH}
R="python3 tests/compat/vllm/run_vllm.py"

logs() { # PART
  for f in /tmp/plug_$1/*/engine*/log.txt; do
    echo "=== $f"
    tail -n 400 "$f"
  done > "$OUT/vllm_$1_log.txt" 2> /dev/null
}

against_vllm() { # PART
  rm -rf "/tmp/plug_$1"
  PYTHONPATH=$S timeout "${LIMIT:-420}" $R --parts "$1" --out "$OUT/vllm_plugin_$1.json" \
    --folder "/tmp/plug_$1" ${ARGS:-}
  echo "rc $?"
  logs "$1"
}

against_transformers() {
  PYTHONPATH=$H timeout "${LIMIT:-300}" python3 tests/compat/run_transformers.py \
    --out "$OUT/transformers.json" ${ARGS:-}
  echo "rc $?"
}

pages() {
  PYTHONPATH=$H OMP_NUM_THREADS=1 timeout "${LIMIT:-300}" python3 -m pytest -q -n 4 -m gpu \
    tests/compat --ignore tests/compat/vllm
  echo "rc $?"
}

vllm_tests() {
  PYTHONPATH=$S OMP_NUM_THREADS=1 timeout "${LIMIT:-200}" python3 -m pytest -q -m gpu \
    tests/compat/vllm
  echo "rc $?"
}

serve() {
  local m pid
  mkdir -p /tmp/plug_extra
  for m in uvicorn httptools; do
    [ -e "$HF/$m" ] && ln -sfn "$HF/$m" /tmp/plug_extra/$m
  done
  PYTHONPATH=$S:/tmp/plug_extra HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
    VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo \
    setsid python3 -m vllm.entrypoints.cli.main serve examples/tiny-llama \
    > "$OUT/serve_log.txt" 2>&1 &
  pid=$!
  for _ in $(seq "${LIMIT:-120}"); do
    curl -sf localhost:8000/health && break
    kill -0 $pid 2> /dev/null || break
    sleep 1
  done
  curl -s localhost:8000/v1/completions -H 'content-type: application/json' -d '{
    "model": "examples/tiny-llama", "prompt": "A list display is",
    "max_tokens": 20, "temperature": 0}'
  echo
  grep -E "plug-in registered|Selected Ostinato" "$OUT/serve_log.txt" | head -5
  kill -- -$pid 2> /dev/null
}

for part in "$@"; do
  began=$(date +%s)
  case $part in
    build)
      PYTHONPATH=$S $R --build || {
        echo "build failed: nothing is measured"
        exit 1
      }
      ;;
    step | long | texts | ranks) against_vllm "$part" ;;
    transformers) against_transformers ;;
    pages | vllm_tests | serve) "$part" ;;
  esac
  echo "--- $part: $(($(date +%s) - began)) s"
done
