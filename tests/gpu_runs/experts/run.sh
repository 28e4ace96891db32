#!/bin/bash
# Mixtures of experts on one GPU beside vLLM's (Triton, DeepGEMM); the engine; padding of batches.
#
#   V=/tmp/V bash tests/gpu_runs/experts/run.sh [PART ...]
#
# PARTs (default: all but rows): rows warm replays sanitize bench padding engine. They run in the
# order below; see run.py for what each does, and quantised_rows.py for rows. The working directory
# is the repository's root.
#
# What it needs
#   V (default /tmp/V) holds vLLM 0.33.0 unpacked: vllm_0.33.0 (its wheel), deps (what it imports),
#   stubs (modules that stand in for what it imports and does not use).
#   Beside this file, for `warm` and `bench`, two archives that are unpacked into V/vllm_0.33.0:
#     moe_site.tar.xz  vllm/_moe_C*.so for sm_90 (slim.py makes it), vLLM's tuned files of the H200,
#                      sgl/common_ops.abi3.so of sglang-kernel 0.4.6 for sm_90
#     dg.tar.xz        vllm/third_party/deep_gemm of vLLM's wheel (DeepGEMM 2.8.1)
#   Where the libraries lie in V already, the archives are not read.
#   OSTINATO_CACHE holds our compiled kernels. With MOE_BUILD=1 those that kernels.txt beside this
#   file names are compiled side by side first (`run.py kernels >kernels.txt` writes it, on any
#   machine); otherwise what is missing is compiled at its first launch.
#   nvcc, and for `sanitize` compute-sanitizer.
#
# What comes back in OUT (default /tmp/moe_out), written as the parts go
#   moe.json         bench, 150 s at most
#   engine_moe.json  engine (85 s), padding (25 s), replays (20 s)
#   sanitize.txt     sanitize, 90 s: four tools side by side, beside `warm` and `replays`
#   warm.log, replays.log, bench.log, engine.log
#   rows.log, quantised_rows.json  rows, 60 s, and as long as its kernels take to compile
# `warm` (60 to 90 s, 14 processes) compiles Triton's and DeepGEMM's kernels for `bench`; it runs
# beside `replays` and `sanitize`, which time nothing. All parts take about 330 s.
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
PY=${PY:-python3}
V=${V:-/tmp/V}
export OUT=${OUT:-/tmp/moe_out} MOE_WORK=${MOE_WORK:-/tmp/moe_work}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
mkdir -p "$OUT" "$MOE_WORK"
PARTS=${*:-warm replays sanitize bench padding engine}
NVCC=$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -1)
NVCC=$(readlink -f "${NVCC:-/usr/local/cuda/bin/nvcc}")
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$NVCC")")}
export VLLM_CACHE_ROOT=/tmp/vllm_cache DG_JIT_CACHE_DIR=/tmp/dg_cache
export TRITON_CACHE_DIR=/tmp/triton_cache
export VLLM_NO_USAGE_STATS=1 VLLM_USE_DEEP_GEMM_E8M0=0
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}
export OSTINATO_SGL_LIBRARY=$V/vllm_0.33.0/sgl/common_ops.abi3.so
THEIRS=$V/vllm_0.33.0:$V/deps:$V/stubs:${PYTHONPATH:-}
began=$(date +%s)
say() { echo "[$(($(date +%s) - began)) s] $*"; }
has() { [[ " $PARTS " == *" $1 "* ]]; }
part() { # NAME LIMIT LOG PYTHONPATH ARGUMENTS...
  local name=$1 limit=$2 log=$3 path=$4
  shift 4
  say "$name begins"
  PYTHONPATH=$path timeout -k 5 "$limit" "$PY" "$HERE/run.py" "$@" >>"$OUT/$log" 2>&1
  say "$name: exit code $?"
}

if has warm || has bench; then
  if [ -d "$V/vllm_0.33.0" ] && [ ! -f "$V/vllm_0.33.0/sgl/common_ops.abi3.so" ]; then
    tar xJf "$HERE/moe_site.tar.xz" -C "$V/vllm_0.33.0" &
    tar xJf "$HERE/dg.tar.xz" -C "$V/vllm_0.33.0"
    wait
  fi
  ls -d "$V"/vllm_0.33.0/vllm/{_moe_C*,third_party/deep_gemm} "$OSTINATO_SGL_LIBRARY"
fi
if [ "${MOE_BUILD:-0}" = 1 ]; then
  "$PY" -m ostinato build --only $(cat "$HERE/kernels.txt") >"$MOE_WORK/build.log" 2>&1
  say "build: exit code $?"
fi

if has rows; then
  say "rows begins"
  timeout -k 5 300 "$PY" "$HERE/quantised_rows.py" --trace 2>&1 | tee "$OUT/rows.log"
  say "rows: exit code ${PIPESTATUS[0]}"
fi

warming=
if has warm; then
  say "warm begins"
  (
    PYTHONPATH=${PYTHONPATH:-} "$PY" "$HERE/run.py" warm_list 2>/dev/null |
      PYTHONPATH=$THEIRS OMP_NUM_THREADS=1 timeout -k 5 120 xargs -P 14 -I{} bash -c \
        'IFS="|" read -r name shape tokens <<<"{}"
         '"$PY"' "'"$HERE"'/run.py" warm "$name" "$shape" $tokens 2>&1' \
        >"$OUT/warm.log" 2>&1
    say "warm: exit code $?"
  ) &
  warming=$!
fi

sanitizing=
if has sanitize; then
  TOOL=$(command -v compute-sanitizer || ls "$CUDA_HOME"/bin/compute-sanitizer \
    "$CUDA_HOME"/compute-sanitizer/compute-sanitizer 2>/dev/null | head -1)
  say "sanitize begins: ${TOOL:-no compute-sanitizer}"
  check() {
    # Kernels of ours alone (their names hold "ostinato"); all of them, if the tool knows no filter.
    local log=$MOE_WORK/$1.log
    timeout -k 5 100 "$TOOL" --tool "$1" --error-exitcode 9 --kernel-regex kns=ostinato \
      "$PY" "$HERE/run.py" sanitized >"$log" 2>&1
    local code=$?
    if ! grep -q "right\|COMPUTE-SANITIZER" "$log"; then
      head -3 "$log" >"$MOE_WORK/$1.first"
      timeout -k 5 100 "$TOOL" --tool "$1" --error-exitcode 9 \
        "$PY" "$HERE/run.py" sanitized >"$log" 2>&1
      code=$?
    fi
    echo $code >"$MOE_WORK/$1.code"
  }
  (
    for tool in memcheck racecheck synccheck initcheck; do check $tool & done
    wait
  ) &
  sanitizing=$!
fi

has replays && part replays 80 replays.log "${PYTHONPATH:-}" replays
if [ -n "$sanitizing" ]; then
  wait $sanitizing
  for tool in memcheck racecheck synccheck initcheck; do
    echo "== $tool: exit code $(cat "$MOE_WORK/$tool.code")"
    head -c 3000 "$MOE_WORK/$tool.log"
    echo ...
    tail -n 25 "$MOE_WORK/$tool.log"
  done >"$OUT/sanitize.txt"
  grep "==\|SUMMARY" "$OUT/sanitize.txt" | grep "exit code\|SUMMARY"
fi
[ -n "$warming" ] && wait $warming
has bench && part bench 190 bench.log "$THEIRS" bench
has padding && part padding 60 engine.log "${PYTHONPATH:-}" padding
has engine && part engine 120 engine.log "${PYTHONPATH:-}" engine
say "all parts done"
grep -h "cannot\|FAILED\|not timed\|exit code\|over the exact" "$OUT"/*.log 2>/dev/null | tail -40
ls -la "$OUT"
