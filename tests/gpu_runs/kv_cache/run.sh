#!/usr/bin/env bash
# Times 8-bit KV caches on a GPU: of the decode op, of prompts, of the engine, and beside vLLM 0.33.
#
#   V=FOLDER OUT=FOLDER bash tests/gpu_runs/kv_cache/run.sh [PART ...]
#
# Started in the repository's root, where `python3 -m ostinato` must work. V is vLLM's unpacked site
# (default /tmp/T), of whose folders vllm_0.33.0, deps and stubs are on PYTHONPATH; only the part
# vllm needs it. OSTINATO_CACHE is the folder of kernels that are already built, OUT is that of
# results. OSTINATO_COMMIT names the commit where there is no git. PY is the interpreter.
#
# Each part writes its rows as it goes, and engine_kv8.json is joined anew after each command, out
# of all that W (/tmp/kv8) has of this commit. So a run that is cut off loses only the row that was
# being measured. Parts, with the seconds they took on one H200; by default all but the last two:
#
# part       seconds  what
# build           45  88 kernels (list: kernels.py), 16 cores; 0 if they are cached
# decode    30 to 45  4 cases x 5 caches
# prefill   25 to 35  2 cases x 5 caches
# step            40  b32, b128 at 4096 and b1 at 512: bf16, fp8 static and token
# engine          60  Engine.generate b32, b128, prompts of 4096, cached: bf16, fp8
# capacity        25  6 GiB of pages, 64 requests of 1024 tokens: bf16, fp8
# vllm           110  vLLM as `engine`, --kv-cache-dtype fp8, scales 1 (limit 170)
# int8            22  step, b32 and b128 at 4096: bf16, int8 token
# invariant       40  prompts by the kernels that the engine takes (batch_invariant)
#
# Files in OUT: decode_kv8.json and prefill_kv8.json of these parts; engine_kv8.json of the others;
# vllm_fp8kv.json of vllm; kv8_parts.tar has the documents that engine_kv8.json is joined of, and
# invariant's; kv8.log the end of each command's output.
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:?}
V=${V:-/tmp/T}
PY=${PY:-python3}
DEVICE=${DEVICE:-}                    # "cpu" tries the script without a GPU
SHAPE=${SHAPE:-llama-3.1-8b}
COMMIT=${OSTINATO_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
W=${W:-/tmp/kv8}/$COMMIT
mkdir -p "$W" "$OUT"
T0=$SECONDS
DEV=${DEVICE:+--device $DEVICE}

say() { echo "[$((SECONDS - T0)) s] $*" | tee -a "$OUT/kv8.log"; }

timed() { # NAME LIMIT COMMAND...
  local name=$1 limit=$2 began=$SECONDS rc
  shift 2
  timeout -k 5 "$limit" "$@" > "$W/$name.log" 2>&1
  rc=$?
  say "$name: rc $rc, $((SECONDS - began)) s"
  grep -v "^\(capturing\|captured\|compil\)" "$W/$name.log" | tail -n "${LINES_OF:-45}" \
    | cut -c1-230 | tee -a "$OUT/kv8.log"
  return $rc
}

bench() { # NAME LIMIT SECTION FLAGS...
  local name=$1 limit=$2
  shift 2
  timed "$name" "$limit" "$PY" -m ostinato bench "$@" $DEV
}

join() { # engine_kv8.json of whatever there is
  local also=() pair=()
  for part in step_4096 step_512 step_int8 engine capacity; do
    [ -s "$W/$part.json" ] && also+=("$W/$part.json")
  done
  local theirs=$W/vllm_int8_default.json
  [ -s "$W/engine.json" ] && [ -s "$theirs" ] && grep -q ms_step "$theirs" \
    && pair=(int8 "$W/engine.json" "$theirs")
  [ ${#also[@]} = 0 ] && return
  rm -f "$W/engine_kv8.json"
  PYTHONPATH=.:${PYTHONPATH:-} $PY tests/side_by_side.py --out "$W/engine_kv8.json" --kv fp8 \
    --also "${also[@]}" -- "${pair[@]}" > "$W/join.log" 2>&1 || {
    say "join failed: $(tail -1 "$W/join.log")"
    return
  }
  cp "$W/engine_kv8.json" "$OUT/"
  [ ${#pair[@]} = 0 ] || cp "$theirs" "$OUT/vllm_fp8kv.json"
  tar -cf "$OUT/kv8_parts.tar" -C "$W" $(cd "$W" && ls *.json | grep -v engine_kv8)
}

build() {
  $PY "$HERE/kernels.py" "$W/model" > "$W/names" \
    && timed build 200 "$PY" -m ostinato build --only $(cat "$W/names")
}

decode() {
  bench decode 100 decode --heads ${HEADS:-32/8} --batch ${DECODE_B:-32 128} \
    --kv ${DECODE_KV:-2048 8192} --page 16 --kv-dtype bf16 fp8 int8 --kv-scales static token \
    --peer none --budget-s 70 --json "$OUT/decode_kv8.json"
}

prefill() {
  bench prefill 100 prefill --cases "${PREFILL_1:-4x4096 p16}" "${PREFILL_2:-1x32768 p16}" \
    --kv-dtype bf16 fp8 int8 --kv-scales static token --peer none --budget-s 70 \
    --json "$OUT/prefill_kv8.json"
}

invariant() {
  timed invariant 90 "$PY" tests/kernels/time_prefill_kv8.py --budget-s 20 \
    --json "$W/prefill_invariant.json"
  join
}

step() {
  bench step_4096 70 step --shape $SHAPE --dtype int8 --batch ${STEP_B:-32 128} \
    --context ${CONTEXT:-4096} --repeats 30 --kv-cache-dtype bf16 fp8 --kv-scales static token \
    --json "$W/step_4096.json"
  join
  bench step_512 50 step --shape $SHAPE --dtype int8 --batch 1 --context 512 --repeats 100 \
    --kv-cache-dtype bf16 fp8 --kv-scales static token --json "$W/step_512.json"
  join
}

int8() {
  bench step_int8 70 step --shape $SHAPE --dtype int8 --batch ${STEP_B:-32 128} \
    --context ${CONTEXT:-4096} --repeats 30 --kv-cache-dtype bf16 int8 --kv-scales token \
    --json "$W/step_int8.json"
  join
}

# The same numbers as vllm's below.
ENGINE_B=${ENGINE_B:-32 128}
PROMPT=${PROMPT:-4096}
SHORT=${SHORT:-8}
LONG=${LONG:-136}

engine() {
  # 8 bits first: they are what vLLM is compared with.
  bench engine 140 engine --shape $SHAPE --dtype int8 --batch $ENGINE_B --prompt $PROMPT \
    --output $SHORT $LONG --cached-prompts --repeats 3 --kv-cache-dtype fp8 bf16 \
    --kv-scales static --json "$W/engine.json"
  join
}

capacity() {
  bench capacity 60 engine --shape $SHAPE --dtype int8 --batch ${CAP_B:-64} \
    --prompt ${CAP_PROMPT:-896} --output ${CAP_OUT:-2 128} --repeats 1 --cache-gib ${CAP_GIB:-6} \
    --kv-cache-dtype bf16 fp8 --kv-scales static --json "$W/capacity.json"
  join
}

vllm() {
  LINES_OF=40 timed vllm 185 env PYTHONPATH="$V/vllm_0.33.0:$V/deps:$V/stubs" \
    "$PY" "$HERE/bench_vllm.py" --kv fp8 --out "$W" --batches "${ENGINE_B// /,}" \
    --captures "${ENGINE_B// /,}" --prompt-len "$PROMPT" --n1 "$SHORT" --n2 "$LONG" \
    --reps 3 --warm 2 --max-seqs 128 --max-model-len $((PROMPT + 256)) --gpu-util 0.85 --limit 170
  join
}

for part in ${*:-build decode prefill step engine capacity vllm}; do
  case $part in
    build | decode | prefill | step | engine | capacity | vllm | int8 | invariant) $part ;;
    *) say "unknown part $part"; exit 2 ;;
  esac
done
say "done: $(ls "$OUT" | tr '\n' ' ')"
