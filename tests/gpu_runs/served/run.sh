#!/usr/bin/env bash
# `ostinato serve` beside vLLM 0.33's OpenAI server on one H200, with the same client (`ostinato
# bench serve`), and a decode step in our server beside `bench engine`. From the repository's root:
#
#   V=/tmp/V bash tests/gpu_runs/served/run.sh [int8|fp8] [PART ...] [-- OPTIONS]
#
# PARTs (default: all), always in this order, with what they take on an H200 and 16 cores:
#   prepare  writes a checkpoint of random W8A8 weights (9.1 GB in /dev/shm, else in /tmp) and
#            begins `ostinato build`                                         20 s + 40 s
#   vllm     starts vLLM's server; the build and our server start beside it  60 to 150 s
#   ours     starts our server; then both are waited for                     40 s
#   load     closed loops at each concurrency: ours, then vLLM               190 s
#   step     stops vLLM; a decode step in our server, batches of 64 and 256  20 s
#   engine   stops ours; `bench engine` at batches of 64 and 256             35 s
#   join     writes serve.json (also after each load, so that a cut-off loses nothing)
# That is about 400 s for one dtype; both may run at once, each on a GPU of its own.
#
# OPTIONS are those of `run.py --help`. --levels 1:20,16:128,64:384,256:1024 (the default) is
# CONCURRENCY:REQUESTS; with 1:20,16:320,64:1280,256:2048 load takes 310 s.
# --ours-flags=--max-prefill-tokens=4096 and --vllm-flags=... (with the = sign) add flags of the
# servers.
#
# Both servers are resident while they are measured (about 53 and 56 GiB); one idles while the other
# works. To have one after the other: `run.sh int8 prepare ours load step`, then
# `run.sh int8 vllm load engine join`; documents of the first wait in --work (/tmp/serve_run).
#
# What it needs: V (default /tmp/V) with vLLM 0.33.0 unpacked: vllm_0.33.0 (its wheel), deps (what it
# imports), stubs (modules that stand in for what it imports and does not use). Beside this file
# whl/, wheels of what vLLM's server imports and V lacks: uvicorn, httptools, python_multipart,
# prometheus_fastapi_instrumentator, model_hosting_container_standards, jmespath. OSTINATO_CACHE may
# hold our compiled kernels; the build adds those that are missing, with nvcc.
#
# What comes back in OUT: serve.json, results.json, logs_DTYPE.tar.xz with every document and log.
# tests/bench/serve/serve_side_by_side.py, which `join` runs, can join the documents again; it keeps
# the rows of other dtypes and cases that serve.json has.
set -u
H="$(cd "$(dirname "$0")" && pwd)"
exec python3 "$H/run.py" "$@"
