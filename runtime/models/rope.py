"""Rotary position embedding: its configuration and the cos/sin table that `append_kv` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .config_fields import Fields, UnsupportedModelError, shown

_MOST_POSITIONS = 2**31 - 1  # that fit into the int32 of positions
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_KNOWN = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
)


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies of a rotary embedding (RoFormer, arXiv 2104.09864) and how they are stretched.

    `theta` is the base; `factor` the context extension, used by every type but "default".
    The `llama3` type reads `low_freq_factor`, `high_freq_factor`; `yarn` (arXiv 2309.00071)
    reads `beta_fast`, `beta_slow`, `attention_factor` (None: derived from `factor`) and
    `truncate`; both read `original_max_position_embeddings`.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @staticmethod
    def from_hf(
        config: Mapping[str, Any], max_position_embeddings: int, where: str = "config.json"
    ) -> RopeConfig:
        """Read `rope_parameters` (transformers >= 5) or `rope_theta` + `rope_scaling` (before).

        Raises:
            UnsupportedModelError: naming the field, for a scaling type other than `ROPE_TYPES`,
                or a field that is unknown, missing or malformed.
        """
        outer = Fields(where, config)
        fields = _scaling_fields(outer)
        for name, value in fields.fields.items():
            if value is not None and name not in _KNOWN:
                raise UnsupportedModelError(
                    f"{fields.where}: {name}: got {shown(value)}, a field that is not supported"
                )
        spelling = "type" if fields.get("rope_type") is None else "rope_type"
        kind = fields.choice(spelling, *ROPE_TYPES, default="default")
        theta = outer.number("rope_theta", 10000.0, above=1.0)
        # The models that `ModelConfig` knows rotate whole heads in transformers, which ignores the
        # field or fails where it says otherwise; other runtimes do as it says.
        for place in (outer, fields):
            place.choice("partial_rotary_factor", 1.0, default=1.0)
        rope = RopeConfig(theta=fields.number("rope_theta", theta, above=1.0), type=kind)
        if kind == "default":
            return rope
        original = fields.integer("original_max_position_embeddings", max_position_embeddings)
        rope = replace(
            rope,
            factor=fields.number("factor"),
            # Beside the scaling, as in configurations of Phi-3, it counts before that within.
            original_max_position_embeddings=outer.integer(
                "original_max_position_embeddings", original
            ),
        )
        if kind == "llama3":
            low = fields.number("low_freq_factor")
            high = fields.number("high_freq_factor", above=low)
            return replace(rope, low_freq_factor=low, high_freq_factor=high)
        if kind == "yarn":
            slow = fields.number("beta_slow", 1.0)
            return replace(
                rope,
                beta_slow=slow,
                beta_fast=fields.number("beta_fast", 32.0, above=slow),
                attention_factor=_attention_factor(fields, rope.factor),
                truncate=fields.boolean("truncate", True),
            )
        return rope

    def longest_context(self, max_position_embeddings: int) -> int:
        """Return how many positions the embedding is stretched to.

        Files with the types "linear" and "yarn" may name those before in
        `max_position_embeddings`; it counts where it is more.
        """
        before = {"linear": max_position_embeddings, "yarn": self.original_max_position_embeddings}
        stretched = before.get(self.type, 0) * self.factor
        return max(max_position_embeddings, int(min(stretched, _MOST_POSITIONS)))

    def cos_sin_table(self, head_dim: int, max_positions: int) -> torch.Tensor:
        """Return the fp32 table [max_positions, head_dim]: first half cos, second half sin."""
        inverse_frequencies = self._inverse_frequencies(head_dim)
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies)
        amplitude = 1.0 if self.attention_factor is None else self.attention_factor
        return torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude

    def _inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
        plain = 1.0 / self.theta ** (pairs / head_dim)
        if self.type == "default":
            return plain
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        return self._yarn(plain, head_dim)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        # Wavelengths beyond the trained context are stretched, short ones kept, and those
        # between interpolated by how many full turns they make in the trained context.
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _yarn(self, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
        def dimension_of(turns: float) -> float:
            context = self.original_max_position_embeddings
            wavelength = math.log(context / (turns * 2 * math.pi))
            return head_dim * wavelength / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # a ramp of no width would divide by zero
        index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        stretch = ((index - low) / (high - low)).clamp(0.0, 1.0)
        return plain * (1.0 - stretch) + plain / self.factor * stretch


def _scaling_fields(config: Fields) -> Fields:
    """Return the fields of both spellings, refusing those that contradict each other."""
    names = ("rope_scaling", "rope_parameters")
    spellings = {name: config.child(name).fields for name in names if config.get(name) is not None}
    merged: dict[str, Any] = {}
    for fields in spellings.values():
        if len(spellings) > 1:
            # The type's name differs, too, and the types must not. What is null is not there.
            fields = {name: value for name, value in fields.items() if value is not None}
            if (kind := fields.pop("type", None)) is not None:
                fields.setdefault("rope_type", kind)
        for name in merged.keys() & fields.keys():
            if merged[name] != fields[name]:
                raise UnsupportedModelError(
                    f"{config.where}: rope_parameters: {name}: got {shown(fields[name])}, "
                    f"expected {shown(merged[name])} as in rope_scaling"
                )
        merged.update(fields)
    return Fields(f"{config.where}: {' and '.join(spellings) or 'rope_parameters'}", merged)


def _attention_factor(fields: Fields, factor: float) -> float:
    """YaRN's amplitude of cos and sin (its §3.4): 0.1·ln(factor) + 1 unless the file says."""

    def amplitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return amplitude(fields.number("mscale")) / amplitude(fields.number("mscale_all_dim"))
    return amplitude(1.0)
