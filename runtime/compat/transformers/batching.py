"""transformers' continuous batching, `model.generate_batch`, with our attention."""

from __future__ import annotations

import weakref
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .. import flash_attn
from .cache import NAME

# transformers takes its paged path, with block tables and graphs, for names that match
# ".*flash.*[23]" alone.
BATCHING_NAME = "ostinato_flash3"
_PAGED_NAME = f"paged|{BATCHING_NAME}"  # what versions before 5.22 make of it


def replace_batching(model: Any) -> bool:
    """Let `model.generate_batch` attend with `ostinato.compat.flash_attn`; return whether it will.

    transformers batches continuously with FlashAttention's functions, eager attention or torch's; a
    model with `attn_implementation="ostinato"` it would switch to FlashAttention where that is
    installed, or refuse. Here the model is switched to the implementation "ostinato_flash3", which
    calls our functions with those arguments, while a manager of batches runs, and back when it
    stops. So it is for `generate_batch`, `continuous_batching_context_manager` and
    `init_continuous_batching`, as long as the model's implementation is "ostinato".

    Args:
        model: of transformers.

    Raises:
        TypeError: when `model` is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, expected a model of transformers")
    known = _their_functions is not None and hasattr(model, "init_continuous_batching")
    if not known or not model._supports_flash_attn:
        return False
    # Such a model would be switched to one of these instead, as GPT-OSS to kernels with sinks.
    if getattr(model, "_compatible_flash_implementations", None):
        return False
    # Of a model in fp32 that is not quantised transformers asks a linear module for its dtype.
    linear = any(isinstance(module, torch.nn.Linear) for module in model.base_model.modules())
    quantized = hasattr(model.config, "_is_quantized")
    if model.dtype is torch.float32 and not linear and not quantized:
        return False
    vars(model)["init_continuous_batching"] = _Manager(model)
    return True


class _Manager:
    """`init_continuous_batching` of a model: the class's, with our attention.

    It is an object, not a closure, so that a deep or pickled copy of the model has one of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        model: Any = self._model
        ours = model.config._attn_implementation == NAME
        if ours:
            model.set_attn_implementation(BATCHING_NAME)
        try:
            manager = type(model).init_continuous_batching(model, *arguments, **options)
        except BaseException:
            if ours:
                model.set_attn_implementation(NAME)
            raise
        if ours:
            manager._original_attn_impl = NAME  # what it sets when it stops
            if model.device.type == "cuda":
                _order_streams(manager, model.device)
        return manager


def _order_streams(manager: Any, device: torch.device) -> None:
    """Have a manager's buffers filled before it copies into them.

    transformers fills them on the current stream and copies token ids on a stream of its own,
    without an event between the two. Where other processes use the GPU, kernels wait for their
    turn and copies do not: the filling came last, and models looked up ids of uninitialised memory.
    """
    create = getattr(type(manager), "_create_batch_processor", None)
    if create is None:  # private to transformers
        return
    owner = weakref.ref(manager)  # whose caches are to be freed with it

    def create_filled() -> Any:
        processor = create(owner())
        torch.cuda.current_stream(device).synchronize()
        return processor

    manager._create_batch_processor = create_filled


def _flash_functions(implementation: str | None, *arguments: Any, **options: Any) -> Any:
    """Return what transformers calls for an implementation's name: for ours, our functions."""
    if implementation not in (BATCHING_NAME, _PAGED_NAME):
        return _their_functions(implementation, *arguments, **options)
    return (
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_varlen_func,
        flash_attn.flash_attn_with_kvcache,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )


# Private to transformers: a version without it has other ways, and is left alone.
_their_functions: Any = getattr(flash_utils, "_lazy_imports", None)
if _their_functions is not None:
    flash_utils._lazy_imports = _flash_functions
    AttentionInterface.register(BATCHING_NAME, flash_attention_forward)
    with suppress(ImportError):  # as newer versions announce, which do without
        paged = import_module("transformers.integrations.flash_paged")
        AttentionInterface.register(_PAGED_NAME, paged.paged_attention_forward)
    for _name in (BATCHING_NAME, _PAGED_NAME):
        AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
