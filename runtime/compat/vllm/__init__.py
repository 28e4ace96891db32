"""Plug-in for vLLM 0.33: its linear layers, attention and norms on the kernels of this package.

vLLM finds `register` by the entry point `ostinato` of the group `vllm.general_plugins` and calls it
in each of its processes. What is replaced then, and what only an option of vLLM turns on, is in
docs/integrations/vllm.md. Nothing here imports vLLM before `register` is called.
"""

from __future__ import annotations

from .version import check_version, found_version

__all__ = ["register"]


def register() -> None:
    """Register everything with vLLM; a second call changes nothing, and CUDA is not initialised.

    One line of vLLM's log names the versions. With a vLLM of another version than 0.33 that line
    is a warning, and nothing is registered.

    Raises:
        ImportError: when vLLM is not installed.
    """
    found = found_version()
    if not check_version(found):
        return
    from . import (
        attention_registry,
        compile_cache,
        dense,
        fused_activation,
        kernel_tables,
        norms,
    )

    compile_cache.register()
    kernel_tables.register()
    fused_activation.register()
    norms.register()
    dense.register()
    attention_registry.register()
