"""One harness for benchmarks of kernels: cases, implementations, a check, a summary, one runner.

A benchmark is a `Benchmark` (benchmark.py): its inputs, its check and its summary. `runner`
captures, checks and times every implementation in every case. `peers` finds the adapters of other
libraries, which are not part of this package.
"""
