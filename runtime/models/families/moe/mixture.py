"""A decoder whose layers have mixtures of experts, and the parts of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ...config import ModelConfig
from ...decoder import ExpertsUse, LinearUse
from ...experts.config import ExpertsConfig
from ...experts.mixture import Mixture
from ...folding import build
from ...layers import Layer, Linear
from ...layout import DecoderLayout
from ...modules import Module, TensorSpec
from ...norms import Addend
from ...parts import ExpertsPart, LinearPart, Loader, TensorPart
from ..llama import (
    Call,
    DecoderLayer,
    LayerParts,
    Llama,
    input_kinds,
    layer_parts,
    layout_of,
)
from ..olmo2 import norms_over_all_heads


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the modules of a mixture, behind "model.layers.0.".

    Args:
        block: the mixture, whose name is in front of all others.
        router: of the logits.
        correction: the tensor of the bias for choosing experts.
        expert: the modules of one expert, for its gate, up and down.
        together: what the same are called where one tensor holds those of all experts, first gate
            and up.
        transposable: whether these tensors may be stored [experts, columns, rows].
        shared: what all tokens go to besides.
        shared_gate: of its weight.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    together: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    transposable: bool = False
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


# Of Mixtral and of what is made after it.
MIXTRAL_NAMES = ExpertNames(
    block="block_sparse_moe", correction="e_score_correction_bias", expert=("w1", "w3", "w2")
)


@dataclass(frozen=True)
class MixtureParts:
    """The parts of a mixture, by the fields of `Mixture`."""

    router: LinearPart
    gate_up: ExpertsPart
    down: ExpertsPart
    correction: TensorPart | None
    shared_gate_up: LinearPart | None
    shared_down: LinearPart | None
    shared_gate: LinearPart | None

    def build(self, loader: Loader) -> Mixture:
        """Return the mixture."""
        return Mixture(**build(self, loader), communicator=loader.communicator)


@dataclass
class MixtureLayer(DecoderLayer):
    """Weights of one layer: with a `mixture`, `gate_up` and `down` are None."""

    gate_up: Linear | None = None  # type: ignore[assignment]
    down: Layer | None = None  # type: ignore[assignment]
    mixture: Mixture | None = None


@dataclass(frozen=True)
class MixtureLayerParts(LayerParts):
    """The parts of one layer, by the fields of `MixtureLayer`."""

    gate_up: LinearPart | None = None  # type: ignore[assignment]
    down: LinearPart | None = None  # type: ignore[assignment]
    mixture: MixtureParts | None = None


class MixtureLlama(Llama):
    """Llama, with mixtures of experts in layers of `config.experts`."""

    layer_type = MixtureLayer

    def experts(self) -> Iterator[ExpertsUse]:
        for layer in self.layers:
            if layer.mixture is not None:
                for name, experts in layer.mixture.experts():
                    yield ExpertsUse(name, experts)

    def _layer_linears(self, layer: Any) -> Iterator[LinearUse]:
        for name, kind in input_kinds(self.config).items():
            if getattr(layer, name) is not None:
                yield LinearUse(name, kind, getattr(layer, name))
        if layer.mixture is not None:
            for use in layer.mixture.linears():
                yield LinearUse(*use)

    def _layer(
        self, index: int, x: Addend, residual: torch.Tensor | None, call: Call
    ) -> tuple[Addend, torch.Tensor]:
        layer, n_active = self.layers[index], call.n_active
        if layer.mixture is None:
            return super()._layer(index, x, residual, call)
        assert self.config.experts is not None, "a layer has a mixture"
        qkv, residual = layer.qkv.after_norm(x, residual, layer.input_norm, n_active)
        x = layer.o(self._attend(index, qkv, call), n_active)
        normed, residual = layer.post_attention_norm.of_sum(x, residual)
        return layer.mixture(normed, self.config.experts, n_active), residual


def mixture_layout(
    names: ExpertNames, attention: Callable[[ModelConfig, int], LayerParts] = layer_parts
) -> Callable[[ModelConfig], DecoderLayout]:
    """Return what makes the layout of a family.

    Args:
        names: of its mixtures.
        attention: returns the parts of a layer of an index that has an MLP, of which those with a
            mixture have all but the MLP.
    """

    def layer(config: ModelConfig, index: int) -> LayerParts:
        usual = attention(config, index)
        experts = config.experts
        if experts is None or not experts.layers[index]:
            return MixtureLayerParts(**vars_of(usual))
        prefix = f"model.layers.{index}.{names.block}."
        parts = mixture_parts(config.hidden_size, experts, prefix, names)
        return MixtureLayerParts(**{**vars_of(usual), "gate_up": None, "down": None}, mixture=parts)

    return lambda config: layout_of(config, layer)


def vars_of(parts: LayerParts) -> dict[str, Any]:
    """Return the parts of a layer by their fields."""
    return {field.name: getattr(parts, field.name) for field in fields(parts)}


def mixture_parts(
    hidden: int, config: ExpertsConfig, prefix: str, names: ExpertNames
) -> MixtureParts:
    """Return the parts of a mixture.

    Args:
        hidden: elements of a token.
        config: of the mixture.
        prefix: of its tensors' names.
        names: of its modules.
    """
    inner, shared = config.intermediate_size, f"{prefix}{names.shared}."
    gate, up, down = names.expert

    def chooser(name: str, rows: int) -> LinearPart:
        module = Module(f"{prefix}{name}", rows, hidden)
        return LinearPart((module,), "per_token", "rows", chooses=True)

    def of_expert(index: int, name: str, rows: int, columns: int) -> Module:
        return Module(f"{prefix}experts.{index}.{name}", rows, columns)

    def shared_part(*modules: str) -> LinearPart | None:
        if not config.shared_size:
            return None
        if modules == ("down_proj",):
            module = Module(f"{shared}down_proj", hidden, config.shared_size)
            return LinearPart((module,), "silu_mul", "columns", "shared_gate_up")
        rows = tuple(Module(f"{shared}{name}", config.shared_size, hidden) for name in modules)
        return LinearPart(rows, "per_token", "rows")

    every = range(config.num_experts)
    count = config.num_experts
    # ERNIE's files have a first dimension of 1, of groups of experts.
    correction = TensorSpec((f"{prefix}{names.correction}",), ((count,), (1, count)))
    return MixtureParts(
        router=chooser(names.router, config.num_experts),
        gate_up=ExpertsPart(
            tuple(
                (of_expert(i, gate, inner, hidden), of_expert(i, up, inner, hidden)) for i in every
            ),
            f"{prefix}{names.together[0]}",
            gated=True,
            transposable=names.transposable,
        ),
        down=ExpertsPart(
            tuple((of_expert(i, down, hidden, inner),) for i in every),
            f"{prefix}{names.together[1]}",
            gated=False,
            transposable=names.transposable,
        ),
        correction=TensorPart(correction, dtype=torch.float32) if config.corrected else None,
        shared_gate_up=shared_part("gate_proj", "up_proj"),
        shared_down=shared_part("down_proj"),
        shared_gate=chooser(names.shared_gate, 1) if config.shared_gate else None,
    )


def with_norms_of_all_heads(config: ModelConfig, index: int) -> LayerParts:
    """Return the parts of Llama's layer, with norms over all heads of q, and of k."""
    q, k = norms_over_all_heads(config, index)
    return replace(layer_parts(config, index), all_q_norm=q, all_k_norm=k)
