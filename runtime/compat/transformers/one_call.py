"""One call that puts our ops into a model of transformers, and says what it did."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as version

from ...checkpoint.errors import UnsupportedCheckpointError
from ...jit.errors import KernelError
from .attention_layers import replace_attention
from .batching import replace_batching
from .cache import NAME
from .linears import quantize_linears
from .norms import replace_norms

_SHOWN = 3  # names of modules in a line


@dataclass(frozen=True)
class Report:
    """What `accelerate` did to a model, and what it left. Printed, it is some lines of text.

    Attributes:
        attention: the model's attention implementation now.
        batching: whether `generate_batch` attends with ours.
        linears: names of linear modules whose products are ours now.
        norms: names of RMS norms that are ours now.
        attention_layers: names of attention layers that rotate and append in one kernel.
        left: names of modules, or of what was to be done, to why they are as they were.
    """

    attention: str
    batching: bool
    linears: tuple[str, ...]
    norms: tuple[str, ...]
    attention_layers: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"attention: {self.attention}"
        yield f"generate_batch: {'ostinato' if self.batching else 'as it was'}"
        yield f"8-bit linear modules: {_some(self.linears)}"
        yield f"RMS norms: {_some(self.norms)}"
        yield f"RoPE and append in one kernel: {_some(self.attention_layers)}"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            yield f"left: {_some(names)}: {reason}"


def accelerate(model: PreTrainedModel, checkpoint: str | os.PathLike[str] | None = None) -> Report:
    """Let a model of transformers run on our ops where they compute what it does, in place.

    It sets `attn_implementation` to "ostinato" and calls `replace_norms`, `replace_attention`,
    `replace_linears` and `replace_batching`; each of them says what it replaces. All else stays
    transformers' own: `generate`, its caches, sampling. `print(accelerate(model))` shows what was
    done and what was left, with the reason.

    With a static cache, `generate` compiles the step and replays it from graphs:
    `model.generate(ids, cache_implementation="static")`. A call that wants gradients needs
    `torch.no_grad()` from now on.

    The model's `dummy_inputs`, some 15 tokens, are computed once, one of them as padding in front
    and with the model's hooks. Where that raises an error the model keeps its own attention.

    Args:
        model: of transformers, on its device and in its dtype.
        checkpoint: the folder or name that it was loaded from; None is `model.name_or_path`.

    Returns:
        What was done, and what was left.

    Raises:
        CheckpointError: when the checkpoint is missing or damaged.
        KernelError: when a kernel is not compiled and can not be compiled now.
        TypeError: when `model` is no model of transformers, or of another dtype.
        ValueError: when the model is quantised and nothing says what it was loaded from.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, expected a model of transformers")
    left: dict[str, str] = {}
    before = _attention_of(model)
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        left["attention"] = f"transformers says: {error}"
    norms = replace_norms(model)
    attention_layers = replace_attention(model)
    try:
        linears = quantize_linears(model, checkpoint)
    except UnsupportedCheckpointError as error:
        left["linear modules"] = str(error)
        replaced = []
    else:
        replaced = linears.replaced
        left.update(linears.left)
    failure = _failure_with_ours(model, before)
    if failure is not None:
        left["attention"] = failure
    after: Any = model.config._attn_implementation
    if after != NAME:
        left.setdefault("attention", f"the model has no other attention than {own!r}")
    batching = after == NAME and replace_batching(model)
    if not batching:
        left["generate_batch"] = (
            f"transformers {version} batches it without FlashAttention's functions"
        )
    left.update(_others(model, {*norms, *attention_layers, *replaced, *left}))
    return Report(
        attention=after,
        batching=batching,
        linears=tuple(replaced),
        norms=tuple(norms),
        attention_layers=tuple(attention_layers),
        left=left,
    )


def _attention_of(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Return the configurations of a model and its parts, each with its attention."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found = {id(config): config for config in configs}
    return [(config, config._attn_implementation_internal) for config in found.values()]


def _failure_with_ours(model: PreTrainedModel, before: list[tuple[Any, Any]]) -> str | None:
    """Return why a model can not have our attention; it has its own from then on.

    Args:
        model: with our attention, if it takes any.
        before: of `_attention_of`, what it had.
    """
    if model.config._attn_implementation != NAME:
        return None
    error = _error_of_forward(model)
    if error is None:
        return None
    for config, own in before:
        config._attn_implementation_internal = own
    if _error_of_forward(model) is None:
        return f"with ours its forward raises: {error}"
    return f"it could not be tried, since a forward of dummy_inputs raises: {error}"


def _error_of_forward(model: PreTrainedModel) -> str | None:
    """Return what a forward of the model's dummy inputs raises, None where that is nothing."""
    if model.device.type == "meta":
        return None
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            model(**{name: x.to(model.device) for name, x in _dummy_inputs(model).items()})
    except KernelError:
        raise
    except Exception as error:
        return str(error) or type(error).__name__
    finally:
        for module in training:
            module.training = True
    return None


def _dummy_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's own, with padding in front of one text, as batches of texts have it."""
    inputs: dict[str, torch.Tensor] = dict(model.dummy_inputs)
    taken = signature(model.forward).parameters
    ids = inputs.get("input_ids")
    if ids is None:
        return inputs
    if "attention_mask" in taken and "attention_mask" not in inputs:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 0] = 0
    if "token_type_ids" in taken:  # processors of some vision models always give them
        inputs.setdefault("token_type_ids", torch.zeros_like(ids))
    return inputs


def _others(model: torch.nn.Module, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield modules that look like ones that are replaced, and are as they were, and why."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name in known or "forward" in vars(module):
            continue
        if "Norm" in kind:
            yield name, f"{kind} computes something else than ops.rms_norm"
        elif kind.endswith("Attention"):
            yield name, f"{kind} does something else to queries and keys than RoPE"
        elif isinstance(module, torch.nn.Linear):
            yield name, "the checkpoint has no 8-bit weight of it"


def _some(names: Any) -> str:
    if not names:
        return "none"
    more = len(names) - _SHOWN
    shown = ", ".join(list(names)[:_SHOWN])
    return f"{len(names)} ({shown}{f' and {more} more' if more > 0 else ''})"
