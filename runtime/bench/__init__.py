"""Latency benchmarks, and the JSON document that their results are kept in."""
