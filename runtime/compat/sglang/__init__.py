"""Our attention and W8A8 products in SGLang, which finds this plug-in by its entry point.

SGLang calls `register` in each of its processes, as the plug-in "ostinato" of the group
`sglang.srt.plugins`. `docs/integrations/sglang.md` says how it is used. What it adds:

- the attention backend "ostinato", `OstinatoBackend`: `--attention-backend ostinato`, or
  `--decode-attention-backend ostinato` for decoding alone;
- products of linear layers in INT8 and FP8, per channel, per tensor and in blocks of 128 by 128, of
  SGLang's methods `w8a8_int8`, `w8a8_fp8`, `compressed-tensors` and `fp8`.

It was tried with SGLang 0.5.23. `SGLANG_PLUGINS`, SGLang's list of the plug-ins that it loads,
turns it off when it has other names alone.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import version

__all__ = ["NAME", "TRIED", "register"]

NAME = "ostinato"  # of the attention backend
TRIED = "0.5.23"

_logger = logging.getLogger(__name__)
_done: list[str] = []  # what a call has registered


def register() -> None:
    """Register the attention backend and the products with SGLang; a second call does nothing.

    It initialises no CUDA. One line of the log says what SGLang will use.

    Raises:
        RuntimeError: for a version of SGLang that lacks an interface, naming it.
    """
    if _done:
        return
    found = version("sglang")
    try:
        choices = import_module("sglang.srt.arg_groups.choices")
        registry = import_module("sglang.srt.layers.attention.attention_registry")
        hooks = import_module("sglang.srt.plugins.hook_registry")
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        registry.register_attention_backend(NAME)(_attention)
        import_module(f"{__name__}.linears").hook_methods(hooks.HookRegistry, hooks.HookType.AROUND)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"sglang: got {found}, expected {TRIED}: {error}") from error
    _done.append(NAME)
    _logger.info(
        "ostinato: W8A8 linear layers run on its kernels, --attention-backend %s is there "
        "(SGLang %s, tried with %s)",
        *(NAME, found, TRIED),
    )


def _attention(runner: object) -> object:
    """Return the backend of a model runner."""
    return import_module(f"{__name__}.attention").OstinatoBackend(runner)
