"""Fixtures of the kernel tests."""

from jit_fixtures import _fresh_process, cache, no_nvcc, nvcc_calls, recorder, write_late  # noqa: F401
