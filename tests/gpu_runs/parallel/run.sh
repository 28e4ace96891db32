#!/usr/bin/env bash
# Ranks on several GPUs of one host: tests, sums over ranks, a 70B engine beside vLLM's, faults.
#
#   V=/tmp/V OUT=FOLDER bash tests/gpu_runs/parallel/run.sh [PART ...]
#
# Started in the repository's root, where `python3 -m ostinato` must work. PARTs (default: all),
# always in this order, with what they should take on two H200s and 32 cores, and their limits:
#
# part         s  limit  what
# build       30    120  kernels that kernels.txt names, 0 s where OSTINATO_CACHE has them
# tests       60    240  pytest -m gpu of tests/parallel, tests/ops/collective, process_group
# replays     70    120  10,000 replays on N ranks, experts too, bits of all and of their twin
# faults      90    120  200 injected faults, as many as there is time for
# all_reduce  60    110  `bench all-reduce`, 16 KB to 128 MB, beside NCCL and symmetric memory
# custom      20     60  `bench all-reduce` beside vLLM's custom all-reduce, up to 4 MB
# engine      60    110  `bench engine`: Llama-3.1-70B's shape in INT8, batches of 1 and 32
# vllm        40         vLLM's step, same shape, batches, GPUs and call
#
# vLLM takes about two minutes to start; it does so beside `build` to `faults`, which time nothing,
# and waits until the others have been timed. `vllm` alone starts and measures it. It is given up
# VLLM_S seconds (520) after the beginning of all.
#
# What it needs
#   V      vLLM 0.33.0 unpacked: vllm_0.33.0, deps, stubs (only for custom and vllm)
#   HF     folder with pytest, where python3 has none (default: none)
#   RANKS  how many GPUs (default: all there are)
#   OSTINATO_CACHE holds our compiled kernels; nvcc makes those that are missing.
#
# What comes back in OUT, written as the parts go: all_reduce.json (+ .txt), all_reduce_vllm.json; engine_tp.json, with
# rows of engine, vllm, replays and faults; parallel.log, what is printed; tests.txt; faults.txt,
# each fault that went wrong; vllm.txt, the end of vLLM's log.
#
# TP_CPU=1 tries it on a CPU with tiny shapes over gloo; V is of no use there.
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:?}
V=${V:-/tmp/V}
PY=${PY:-python3}
export OUT W=${W:-/tmp/tp_run}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# NVLink multicast stays off: it can put a host's GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
# Torch asks a name server whenever a rank connects to a store, and there may be none.
export RES_OPTIONS="timeout:1 attempts:1"
mkdir -p "$OUT" "$W"
PARTS=${*:-build tests replays faults all_reduce custom engine vllm}
CPU=${TP_CPU:-0}
RANKS=${RANKS:-$($PY "$HERE/run.py" count)}
OURS=${HF:+$HF:}${PYTHONPATH:-}
THEIRS=$V/vllm_0.33.0:$V/deps:$V/stubs:$HERE/../../compat/vllm:${PYTHONPATH:-}
DEV=
[ "$CPU" = 1 ] && DEV="--device cpu"
began=$SECONDS

say() { echo "[$((SECONDS - began)) s] $*" | tee -a "$OUT/parallel.log"; }
has() { [[ " $PARTS " == *" $1 "* ]]; }

timed() { # NAME LIMIT COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  say "$name begins"
  local log=${LOG:-$W/$name.log}
  PYTHONPATH=${PATHS:-$OURS} timeout -k 5 "$limit" "$@" >"$log" 2>&1
  say "$name: exit code $?, $((SECONDS - start)) s"
  grep -v "^\(capturing\|captured\|compil\|\*\*\*\)" "$log" | tail -n "${LINES_OF:-40}" |
    cut -c1-240 | tee -a "$OUT/parallel.log"
}

ranks() { # ARGUMENTS of torchrun
  echo "$PY" -m torch.distributed.run --nproc-per-node "$RANKS" \
    --master-addr 127.0.0.1 --master-port "$((29500 + RANDOM % 2000))" "$@"
}

join() { PYTHONPATH=$OURS $PY "$HERE/run.py" join; }

build() {
  PYTHONPATH=$OURS $PY "$HERE/run.py" kernels "$RANKS" >"$W/kernels.txt" || return
  # shellcheck disable=SC2046
  LINES_OF=5 timed build 120 "$PY" -m ostinato build --only $(cat "$W/kernels.txt")
}

tests() {
  local marks=(-m gpu)
  [ "$CPU" = 1 ] && marks=(-m gpu --collect-only)
  # -v writes a line for each test, so that what is cut off loses nothing.
  LOG=$OUT/tests.txt LINES_OF=30 timed tests 240 "$PY" -m pytest -v -rfE "${marks[@]}" -p no:cacheprovider \
    --timeout 60 tests/parallel tests/graphs/process_group tests/ops/collective
}

replays() {
  rm -f "$W/replays.rows"
  # shellcheck disable=SC2046
  timed replays 120 $(ranks "$HERE/run.py" replays)
  join
}

faults() {
  rm -f "$W/faults.rows"
  LINES_OF=15 timed faults 220 "$PY" "$HERE/run.py" faults "$RANKS"
  join
}

all_reduce() {
  local sizes="--rows 1 4 16 64 256 1024 2048 8192"
  [ "$CPU" = 1 ] && sizes="--rows 1 3 --hidden 64"
  # shellcheck disable=SC2046,SC2086
  LINES_OF=80 timed all_reduce 110 $(ranks -m ostinato bench all-reduce) $sizes $DEV \
    --json "$OUT/all_reduce.json"
}

custom() {
  rm -f "$OUT/all_reduce_vllm.json"
  # shellcheck disable=SC2046
  PATHS=$THEIRS LINES_OF=30 timed custom 60 \
    $(ranks -m ostinato bench all-reduce) --rows 1 4 16 64 256 --form sum int8 \
    --peer vllm_custom --json "$W/all_reduce_vllm.json"
  [ -s "$W/all_reduce_vllm.json" ] && cp "$W/all_reduce_vllm.json" "$OUT/"
}

engine() {
  # shellcheck disable=SC2046
  timed engine 110 $(ranks -m ostinato bench engine --tp "$RANKS") \
    $(PYTHONPATH=$OURS $PY "$HERE/run.py" engine_flags) $DEV --json "$W/engine.json"
  join
}

vllm=
if has vllm; then
  rm -rf "$W/go" "$W/vllm" "$W/vllm.rows"
  say "vllm starts"
  PYTHONPATH=$OURS THEIRS=$THEIRS timeout -k 5 580 "$PY" "$HERE/run.py" vllm "$RANKS" \
    >"$W/vllm.log" 2>&1 &
  vllm=$!
fi
for part in build tests replays faults all_reduce custom engine; do
  has "$part" && "$part"
done
if [ -n "$vllm" ]; then
  touch "$W/go"
  # It has been starting beside the others.
  while kill -0 $vllm 2>/dev/null && [ $((SECONDS - began)) -lt "${VLLM_S:-520}" ]; do
    sleep 1
  done
  kill $vllm 2>/dev/null
  wait $vllm
  say "vllm: exit code $?"
  tail -n 20 "$W/vllm.log" | cut -c1-240 | tee -a "$OUT/parallel.log"
  tail -n 60 "$W"/vllm/engine*/log.txt 2>/dev/null | cut -c1-300 >"$OUT/vllm.txt"
  join
fi
say "all parts done"
ls -la "$OUT"
