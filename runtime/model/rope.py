"""Rotary position embedding: its configuration and the cos/sin table that `append_kv` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class UnsupportedModelError(ValueError):
    """A model whose configuration asks for something this runtime does not implement."""


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
    partial_rotary_factor: float = 1.0

    @staticmethod
    def from_hf(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (transformers >= 5) or `rope_theta` + `rope_scaling` (before).

        Raises:
            UnsupportedModelError: for a scaling type other than `ROPE_TYPES`.
        """
        fields: dict[str, Any] = dict(config.get("rope_scaling") or {})
        fields.update(config.get("rope_parameters") or {})
        kind = fields.get("rope_type", fields.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope scaling: got type {kind!r}, expected one of {', '.join(ROPE_TYPES)}"
            )
        if kind != "default" and "factor" not in fields:
            raise UnsupportedModelError(f"rope scaling: type {kind!r} needs a 'factor', got none")
        theta = fields.get("rope_theta", config.get("rope_theta", 10000.0))
        factor = float(fields.get("factor") or 1.0)
        return RopeConfig(
            theta=float(theta),
            type=kind,
            factor=factor,
            original_max_position_embeddings=int(
                fields.get("original_max_position_embeddings") or max_position_embeddings
            ),
            low_freq_factor=float(fields.get("low_freq_factor", 1.0)),
            high_freq_factor=float(fields.get("high_freq_factor", 4.0)),
            beta_fast=float(fields.get("beta_fast") or 32.0),
            beta_slow=float(fields.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(kind, fields, factor),
            truncate=bool(fields.get("truncate", True)),
            partial_rotary_factor=float(
                fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
            ),
        )

    def cos_sin_table(self, head_dim: int, max_positions: int) -> torch.Tensor:
        """Return the fp32 table [max_positions, rotary_dim]: first half cos, second half sin."""
        rotary_dim = int(head_dim * self.partial_rotary_factor)
        inverse_frequencies = self._inverse_frequencies(rotary_dim)
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies)
        amplitude = 1.0 if self.attention_factor is None else self.attention_factor
        return torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude

    def _inverse_frequencies(self, rotary_dim: int) -> torch.Tensor:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        plain = 1.0 / self.theta**exponents
        if self.type == "default":
            return plain
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        return self._yarn(plain, rotary_dim)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        # Wavelengths beyond the trained context are stretched, short ones kept, and those
        # between interpolated by how many full turns they make in the trained context.
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _yarn(self, plain: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        def dimension_of(turns: float) -> float:
            context = self.original_max_position_embeddings
            wavelength = math.log(context / (turns * 2 * math.pi))
            return rotary_dim * wavelength / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # a ramp of no width would divide by zero
        index = torch.arange(rotary_dim // 2, dtype=torch.float32)
        stretch = ((index - low) / (high - low)).clamp(0.0, 1.0)
        return plain * (1.0 - stretch) + plain / self.factor * stretch


def _attention_factor(kind: str, fields: Mapping[str, Any], factor: float) -> float | None:
    """YaRN's amplitude of cos and sin (its §3.4): 0.1·ln(factor) + 1 unless the file says."""
    if kind != "yarn":
        return None

    def amplitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return amplitude(float(fields["mscale"])) / amplitude(float(fields["mscale_all_dim"]))
    return amplitude(1.0)
