"""Attention layers of a model with RoPE and the cache's append in one kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import NAME, Rows, RowsLayer
from .linear_module import QuantizedLinear
from .replace import Forward, is_known_to_agree, replace_forwards

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_ATTRIBUTES = ("head_dim", "scaling", "layer_idx", "config")
_PARAMETERS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")
_TRIAL = "ostinato trial"  # the attention implementation of a trial, which only records


def replace_attention(model: torch.nn.Module) -> list[str]:
    """Let `ops.append_kv` rotate q and k and fill the cache in a model, in place; return where.

    In a call with rows of a `RaggedStaticCache`, what lies between the projections of a replaced
    layer and its attention is one kernel on a Hopper GPU, instead of RoPE's ten of torch and one to
    append: the call's cosines and sines are put into a table once, for all layers.

    A submodule is replaced when its class's name ends in Attention, it looks like Llama's (of
    submodules it has `q_proj`, `k_proj`, `v_proj` and `o_proj` alone, and a `head_dim`, `scaling`,
    `layer_idx` and `config`; its forward takes `hidden_states`, `position_embeddings`,
    `attention_mask`, `past_key_values` and keywords), and it computes what ours does: the same q
    for the attention function, with the same arguments, the same keys and values in the cache, and
    the same result. The last is tried on random numbers, with random projections in place of its
    own, whose hooks do not run. The numbers have so few bits that none is rounded, and a difference
    of any size counts. All else is left as it is: layers that norm q and k (Qwen3's), clip or scale
    them, rotate other pairs of elements (Cohere's) or attend with a softcap (Gemma 2's); those that
    raise when they are tried, such as of a dtype that the op does not take or on the meta device;
    and modules whose `forward` is not their class's, such as those with hooks of accelerate and
    those replaced before. So a second call replaces nothing. A model that compressed-tensors has
    loaded may be given before its first forward, which decompresses it, or after that.

    Parameters and the state dict stay as they are, and a deep or pickled copy of the model has
    layers of its own. A replaced layer calls its projections as modules, and its class's forward

    - with another cache or none, or an attention implementation other than "ostinato",
    - in training mode,
    - for hidden states or parameters that require a gradient, while gradients are enabled.

    The halves of the model's cosines and sines must be equal, as transformers makes them; they are
    not compared in a call. The op rounds q and k once; transformers rounds both products, too, so
    that bits differ.

    Args:
        model: of transformers, or any other module.

    Returns:
        The names of the submodules that this call replaced, in the order of `named_modules`.

    Raises:
        KernelError: when the op's kernel is not compiled and can not be compiled now.
        TypeError: when `model` is no module; by a replaced layer, for a cache of another dtype.
        ValueError: by a replaced layer, for other rows or tokens than those of the cache's rows.
    """
    return replace_forwards(model, _forward_of)


def _forward_of(module: torch.nn.Module) -> Forward | None:
    """Return a layer's new forward, None for one that is left as it is."""
    known = _looks_like_llamas(module) and is_known_to_agree(lambda: _computes_ours(module))
    return _forward if known else None


def _forward(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Return the layer's output, by our op or by its class, and its attention's weights."""
    if (
        not isinstance(past_key_values, Rows)
        or position_embeddings is None
        or module.training  # with what it may drop
        or module.config._attn_implementation != NAME
        or _wants_gradient(module, hidden_states)
    ):
        result: tuple[torch.Tensor, Any] = type(module).forward(
            module,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **others,
        )
        return result
    return _fused(
        module, hidden_states, position_embeddings, attention_mask, past_key_values, **others
    )


def _wants_gradient(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Return whether one is enabled of x or of a parameter."""
    return torch.is_grad_enabled() and (
        x.requires_grad or any(parameter.requires_grad for parameter in module.parameters())
    )


def _fused(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    past_key_values: Rows,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Return what `_forward` does, with RoPE and the append in one kernel.

    Args:
        module: the layer.
        hidden_states: [batch, tokens, hidden].
        position_embeddings: cosines and sines, [batch or 1, tokens, head_dim] each.
        attention_mask: for the attention function.
        past_key_values: of as many rows and tokens.
        others: likewise for the attention function.
    """
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim))
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    q, keys, values = past_key_values.rotate_and_append(
        q, k, v, *position_embeddings, module.layer_idx
    )
    if (window := _sliding_window(module)) is not None:
        others["sliding_window"] = window
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    out, weights = attend(
        module,
        q.transpose(1, 2),
        keys,
        values,
        attention_mask,
        dropout=0.0,
        scaling=module.scaling,
        **others,
    )
    return module.o_proj(out.flatten(2)), weights


def _sliding_window(module: Any) -> int | None:
    """Return the window that a layer should attend with: its own, or as Mistral the config's."""
    of = module if hasattr(module, "sliding_window") else module.config
    window: int | None = getattr(of, "sliding_window", None)
    return window


def _looks_like_llamas(module: torch.nn.Module) -> bool:
    """Return whether a module has the parts of Llama's attention."""
    if not type(module).__name__.endswith("Attention"):
        return False
    if {name for name, _ in module.named_children()} != set(_PROJECTIONS):
        return False
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return False
    taken = list(signature(type(module).forward).parameters.values())
    return (
        tuple(parameter.name for parameter in taken[1:-1]) == _PARAMETERS
        and taken[-1].kind is Parameter.VAR_KEYWORD
    )


def _computes_ours(module: torch.nn.Module) -> bool:
    """Return whether a layer's class does with random numbers what `_fused` does."""
    trial = _Trial(module)
    theirs, their_options = trial.outcome(type(module).forward)
    ours, our_options = trial.outcome(_fused)
    return (
        all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
        and their_options.keys() == our_options.keys()
        and all(
            option is our_options[name] or option == our_options[name]
            for name, option in their_options.items()
        )
    )


class _Trial:
    """A copy of a layer for calls with rows of a cache, with numbers that no dtype has to round.

    They are integers of up to 3 bits, times a power of two of each token's own, which shows what
    does something to large or small numbers alone, such as clipping. Cosines and sines are eighths,
    so that what RoPE makes of them has 7 bits.

    Args:
        module: the layer; neither it nor its projections are called.
    """

    def __init__(self, module: Any) -> None:
        projections = {name: getattr(module, name) for name in _PROJECTIONS}
        dim = module.head_dim
        held = next(chain(module.q_proj.parameters(), module.q_proj.buffers()))
        # Quantised weights are of integers or FP8, and results of the config's dtype.
        quantized = held.itemsize == 1 or isinstance(module.q_proj, QuantizedLinear)
        self._dtype = module.config.dtype if quantized else held.dtype
        self._device = device = held.device
        # The caller's random numbers stay as they are.
        self._generator = torch.Generator().manual_seed(0)
        powers = torch.tensor([[12, 0, -10], [0, -10, 12]], device="cpu").unsqueeze(2)
        self._hidden_states = self._integers(2, 3, module.q_proj.in_features)
        self._hidden_states *= self._like(2.0**powers)
        halves = [self._integers(2, 3, dim // 2) / 8 for _ in range(2)]
        cos, sin = (torch.cat([half, half], dim=2) for half in halves)
        self._memory = self._integers(2, 2, module.k_proj.out_features // dim, 16, dim)
        # The second row begins with padding.
        self._slots = torch.tensor([[4, 5, 6], [-1, 16, 17]], device="cpu").to(device)
        mask = torch.ones((2, 1, 1, 1), dtype=torch.int32, device=device)
        self._given = {
            "position_embeddings": (cos, sin),
            "attention_mask": mask,
            # Far behind, for what depends on positions.
            "position_ids": torch.arange(6, device=device).view(2, 3) + 2**20,
            "seq_lens": mask[:, 0, 0, 0],
            "use_cache": True,
        }
        self._copy = copy.copy(module)  # which has the layer's own dict of submodules
        vars(self._copy)["_modules"] = {
            name: self._picks(projection.in_features, projection.out_features)
            for name, projection in projections.items()
        }
        self._copy.training = False
        self._copy.config = copy.deepcopy(module.config)
        self._copy.config._attn_implementation = _TRIAL
        self._copy.attended = self._integers(2, 3, module.q_proj.out_features // dim, dim)

    def _integers(self, *shape: int) -> torch.Tensor:
        drawn = torch.randint(-7, 8, shape, generator=self._generator, device="cpu")
        return self._like(drawn)

    def _like(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._device, self._dtype)

    def _picks(self, inputs: int, outputs: int) -> _Picks:
        indices = torch.randint(inputs, (outputs,), generator=self._generator, device="cpu")
        signs = torch.randint(2, (outputs,), generator=self._generator, device="cpu") * 2 - 1
        return _Picks(indices.to(self._device), self._like(signs))

    def outcome(self, forward: Callable[..., Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return all that a forward computes, and the options of its call of the attention."""
        memory = self._memory.clone()
        layers = [None] * self._copy.layer_idx + [RowsLayer(memory, self._slots)]
        rows = Rows(layers, self._slots, self._slots[:, 0])
        hidden_states = self._hidden_states.clone()  # in case that it is written to
        self._copy.calls = []
        out, _ = forward(self._copy, hidden_states, past_key_values=rows, **self._given)
        ((tensors, options),) = self._copy.calls
        return [out, hidden_states, memory, *tensors], options


class _Picks(torch.nn.Module):
    """A projection whose outputs each are one of its inputs, or that one's negative.

    Args:
        indices: [outputs] int64, of the inputs.
        signs: [outputs], 1 or -1.
    """

    def __init__(self, indices: torch.Tensor, signs: torch.Tensor) -> None:
        super().__init__()
        self.indices, self.signs = indices, signs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs] of x [..., inputs]."""
        return x[..., self.indices] * self.signs


def _record(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Note a trial's call of the attention function, and return what was made up for it."""
    given = {name: option for name, option in options.items() if option is not None}
    module.calls.append(([query, key.clone(), value.clone(), attention_mask], given))
    return module.attended, None


AttentionInterface.register(_TRIAL, _record)
