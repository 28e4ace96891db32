#!/usr/bin/env bash
# All tests marked gpu but those of real models, on one GPU or two, and what became of each.
#
#   OUT=FOLDER bash tests/gpu_runs/suite/run.sh [PART ...]
#
# Started in the repository's root, where `import ostinato` must work; tests/compat wants
# transformers 5.23, compressed-tensors and loguru, too. OSTINATO_CACHE holds the kernels (`make
# gpu-kernels` compiles all that tests launch); nvcc makes those that are missing.
#
# part     what                                                        processes   seconds, one H200
# kernels  tests/kernels, injected delays included                     14          43
# ops      tests/ops                                                   14          198
# rest     all others but those of the next line                       10          > 540, with slow
# slow     tests that trace or wait: engines side by side, interrupts  4           > 540, with rest
#
# Processes that share a GPU have it in turns: tests of whole engines took up to 100 s each.
#
# The parts run in the order that is given (default: rest slow ops kernels, so that a run that is cut
# off has begun with what nothing else tests), two at once where there are two GPUs: kernels and
# rest on one, ops and slow on the other.
# LIMIT is that of one test in seconds (300). What comes back in OUT: PART.txt with a line for each
# test, so that a run that is cut off loses nothing; summary.txt.
set -u
OUT=${OUT:?}
PY=${PY:-python3}
LIMIT=${LIMIT:-300}
export OMP_NUM_THREADS=1
PARTS=${*:-rest slow ops kernels}
SLOW="tests/engine/test_engine_independence.py tests/models/test_models_required_kernels.py
  tests/graphs/backends/test_graphs_cuda_interrupts.py"
mkdir -p "$OUT"

pytest_of() { # PART PROCESSES ARGUMENTS...
  local part=$1 processes=$2
  shift 2
  $PY -m pytest -v -rfE --tb=short -m 'gpu and not real' -n "$processes" --dist worksteal \
    --timeout "$LIMIT" -p no:cacheprovider "$@" >"$OUT/$part.txt" 2>&1
  echo "$part: $(tail -n 1 "$OUT/$part.txt")" | tee -a "$OUT/summary.txt"
}

kernels() { pytest_of kernels 14 tests/kernels; }
ops() { pytest_of ops 14 tests/ops; }
slow() { pytest_of slow 4 $SLOW; }
rest() {
  local ignored=()
  for path in tests/kernels tests/ops tests/compat/vllm tests/parallel \
    tests/graphs/process_group $SLOW; do
    ignored+=(--ignore "$path")
  done
  pytest_of rest 10 tests "${ignored[@]}"
}

# Those of PARTS that are among the arguments.
run() {
  local part
  for part in $PARTS; do
    [[ " $* " == *" $part "* ]] && $part
  done
}

if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  CUDA_VISIBLE_DEVICES=1 run ops slow &
  CUDA_VISIBLE_DEVICES=0 run kernels rest
  wait
else
  run kernels ops rest slow
fi
