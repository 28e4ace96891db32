"""What can go wrong between a variant and its loaded library."""

from __future__ import annotations


class KernelError(RuntimeError):
    """A kernel library cannot be had."""


class MissingKernelError(KernelError):
    """A variant is not compiled, and must or can not be compiled now."""


class KernelBuildError(KernelError):
    """Compiling failed: the toolchain is missing or reports errors, or the disk is full."""


class KernelCacheError(KernelError):
    """The cache cannot be used: it has no place, or others could have their code run from it."""
