"""What mixtures of experts of a model are like, and the fields of config.json that say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...ops.moe.route import MOST_EXPERTS, MOST_TOP_K
from ..config_fields import Fields, UnsupportedModelError

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts of a model, which are alike in all layers that have one.

    A token goes to the `top_k` experts with the largest scores, plus a correction if `corrected`,
    within the `top_groups` of `num_groups` groups of neighbouring experts whose best two scores add
    up to the most. An expert's results are weighted by its score without the correction, divided
    by the sum of all that were chosen if `normalized`, times `scale`.

    Args:
        num_experts: of a layer.
        top_k: experts of a token.
        intermediate_size: of each expert's MLP.
        layers: whether each layer of the model has a mixture instead of an MLP.
        scoring: what makes scores of the router's logits, over all experts or each by itself.
        normalized: whether weights of a token add up to `scale`.
        scale: of the weights.
        num_groups, top_groups: of experts.
        corrected: whether the layer has a bias for choosing experts.
        shared_size: intermediate size of what all tokens go to besides; 0 where there is none.
        shared_gate: whether its results are multiplied by a sigmoid of each token.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    scoring: Scoring = "softmax"
    normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    corrected: bool = False
    shared_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        groups, each = self.num_groups, self.num_experts // max(1, self.num_groups)
        if self.num_experts % max(1, groups):
            raise UnsupportedModelError(
                f"num_groups: got {groups}, expected a divisor of num_experts = {self.num_experts}"
            )
        if groups > 1 and each < 2:
            raise UnsupportedModelError(
                f"num_groups: got {groups} of {each} expert each, expected groups of 2 or more"
            )
        if not 1 <= self.top_groups <= groups:
            raise UnsupportedModelError(
                f"top_groups: got {self.top_groups}, expected 1 to num_groups = {groups}"
            )
        if not 1 <= self.top_k <= self.top_groups * each:
            raise UnsupportedModelError(
                f"top_k: got {self.top_k}, expected 1 to {self.top_groups * each}, the experts of "
                f"{self.top_groups} of {groups} groups"
            )


def read_experts(
    fields: Fields,
    layers: tuple[bool, ...],
    *,
    count: str | None = None,
    chosen: str = "num_experts_per_tok",
    size: str = "moe_intermediate_size",
    normalized: bool | None = None,
) -> ExpertsConfig:
    """Return what most families have in common: a softmax over all experts.

    Args:
        fields: of config.json, with the family's defaults.
        layers: which layers have a mixture.
        count: the field with the number of experts; None: `num_experts`, or `num_local_experts`,
            as newer versions of transformers write it.
        chosen: the field with the number of a token's.
        size: the field with their intermediate size.
        normalized: as of `ExpertsConfig`; None: `norm_topk_prob` of the file.

    Raises:
        UnsupportedModelError: naming the field.
    """
    if count is None:
        newer = fields.get("num_experts") is None and fields.get("num_local_experts") is not None
        count = "num_local_experts" if newer else "num_experts"
    num_experts = fields.integer(count, most=MOST_EXPERTS)
    if normalized is None:
        normalized = fields.boolean("norm_topk_prob", False)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer(chosen, most=min(num_experts, MOST_TOP_K)),
        intermediate_size=fields.integer(size),
        layers=layers,
        normalized=normalized,
    )


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have a mixture, by Qwen's `decoder_sparse_step` and `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    without = fields.integers("mlp_only_layers", least=0)
    return tuple(layer not in without and (layer + 1) % step == 0 for layer in range(num_layers))


def layers_from(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have a mixture, by DeepSeek's `first_k_dense_replace`."""
    first = fields.integer("first_k_dense_replace", 0, least=0)
    return tuple(layer >= first for layer in range(num_layers))
