"""Rotary position embedding: its configuration and the cos/sin table that `append_kv` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .config_fields import Fields, UnsupportedModelError, shown

_MOST_POSITIONS = 2**31 - 1  # that fit into the int32 of positions
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
_ALIASES = {"su": "longrope"}  # as the first files of Phi-3 spell it
_KNOWN = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor"),
)
# Of the families that scale queries by position; the second repeats a field of the model.
_QUERY_SCALING = ("llama_4_scaling_beta", "max_position_embeddings")
# Of text towers whose positions have a time, a height and a width, which are equal in texts.
_MULTIMODAL = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies of a rotary embedding (RoFormer, arXiv 2104.09864) and how they are stretched.

    `theta` is the base; `factor` the context extension, used by every type but "default".
    The `llama3` type reads `low_freq_factor`, `high_freq_factor`; `yarn` (arXiv 2309.00071)
    reads `beta_fast`, `beta_slow`, `attention_factor` (None: derived from `factor`) and
    `truncate`; both read `original_max_position_embeddings`. `longrope` (arXiv 2402.13753) divides
    each frequency by `long_factor` where a longer context than `original_max_position_embeddings`
    is served, else by `short_factor`. `dynamic` enlarges the base where a longer context is served
    than the model was trained for, which is its `original_max_position_embeddings`. `ntk_alpha`
    enlarges it by `alpha`, whatever context is served; files call it `dynamic`, too.

    `partial_rotary_factor` is the share of a head that is rotated, from its beginning. Elements
    (2i, 2i + 1) are rotated together if `interleaved`, else (i, i + rotary_dim / 2). Queries at
    position p are multiplied by 1 + `query_scaling_beta`·ln(1 + floor(p / c)), where c is
    `original_max_position_embeddings`.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    query_scaling_beta: float = 0.0
    alpha: float = 1.0

    @staticmethod
    def from_hf(
        config: Mapping[str, Any],
        max_position_embeddings: int,
        where: str = "config.json",
        *,
        partial: bool = False,
        interleaved: bool = False,
        query_scaling: bool = False,
        multimodal: bool = False,
        fixed_alpha: bool = False,
    ) -> RopeConfig:
        """Read `rope_parameters` (transformers >= 5) or `rope_theta` + `rope_scaling` (before).

        Args:
            config: the contents of `config.json`.
            max_position_embeddings: of the model.
            where: what the contents come from, for messages.
            partial: whether the family reads `partial_rotary_factor`.
            interleaved: which elements the family rotates together.
            query_scaling: whether the family reads `llama_4_scaling_beta`.
            multimodal: whether the family has positions of several axes (M-RoPE).
            fixed_alpha: whether the family reads `alpha`.

        Raises:
            UnsupportedModelError: naming the field, for a scaling type other than `ROPE_TYPES`,
                or a field that is unknown, missing or malformed.
        """
        outer = Fields(where, config)
        fields = _scaling_fields(outer)
        optional = ((query_scaling, _QUERY_SCALING), (multimodal, _MULTIMODAL))
        alpha = ("alpha",) if fixed_alpha else ()
        fields.only(*_KNOWN, *alpha, *(name for read, names in optional if read for name in names))
        spelling = "type" if fields.get("rope_type") is None else "rope_type"
        aliases = {**_ALIASES, "mrope": "default"} if multimodal else _ALIASES
        kind = fields.choice(spelling, *ROPE_TYPES, *aliases, default="default")
        kind = aliases.get(kind, kind)
        theta = outer.number("rope_theta", 10000.0, above=1.0)
        rope = RopeConfig(
            theta=fields.number("rope_theta", theta, above=1.0),
            type=kind,
            partial_rotary_factor=_partial_rotary_factor(outer, fields, partial),
            interleaved=interleaved,
        )
        if kind == "default":
            fields.choice("llama_4_scaling_beta", None)  # which would need the original context
            return rope
        if kind == "dynamic" and fields.get("alpha"):
            return replace(rope, type="ntk_alpha", alpha=fields.number("alpha"))
        fields.choice("alpha", None, 0)  # which the other types do not have
        if kind == "dynamic":
            # transformers takes the field of the trained context for it, whatever these say.
            for place in (outer, fields):
                place.choice("original_max_position_embeddings", None, max_position_embeddings)
        if fields.get("llama_4_scaling_beta"):
            beta = fields.number("llama_4_scaling_beta")
            rope = replace(rope, query_scaling_beta=beta)
        original = fields.integer("original_max_position_embeddings", max_position_embeddings)
        if kind == "longrope":
            return _longrope(rope, outer, fields, original, max_position_embeddings)
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
        before = {
            "linear": max_position_embeddings,
            "dynamic": max_position_embeddings,
            "yarn": self.original_max_position_embeddings,
        }
        stretched = before.get(self.type, 0) * self.factor
        return max(max_position_embeddings, int(min(stretched, _MOST_POSITIONS)))

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many elements of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Check that the embedding fits heads of this size.

        Raises:
            UnsupportedModelError: naming the field, when it does not.
        """
        rotary_dim = self.rotary_dim(head_dim)
        # Where a base is enlarged, it has the exponent dim / (dim - 2).
        least = 4 if self.type in ("dynamic", "ntk_alpha") else 2
        if rotary_dim % 2 or rotary_dim < least:
            raise UnsupportedModelError(
                f"partial_rotary_factor: got {self.partial_rotary_factor}, which rotates "
                f"{rotary_dim} of {head_dim} elements, expected an even number from {least} on"
            )
        for name in ("short_factor", "long_factor") if self.type == "longrope" else ():
            if len(getattr(self, name)) != rotary_dim // 2:
                raise UnsupportedModelError(
                    f"{name}: got {len(getattr(self, name))} numbers, expected "
                    f"{rotary_dim // 2}: one for each pair of rotated elements"
                )

    def cos_sin_table(self, head_dim: int, max_positions: int) -> torch.Tensor:
        """Return the fp32 table [max_positions, rotary_dim]: first half cos, second half sin.

        With the types "longrope" and "dynamic" it depends on `max_positions`, the longest context
        that is served, so that a sequence's bits depend neither on its length nor on the batch.
        """
        inverse_frequencies = self._inverse_frequencies(self.rotary_dim(head_dim), max_positions)
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies)
        amplitude = 1.0 if self.attention_factor is None else self.attention_factor
        return torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude

    def query_scales(self, max_positions: int) -> torch.Tensor | None:
        """Return the fp32 factors [max_positions] of queries; None where all are 1."""
        original = self.original_max_position_embeddings
        if self.query_scaling_beta == 0.0 or max_positions <= original:
            return None
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        return 1.0 + self.query_scaling_beta * (1.0 + (positions / original).floor()).log()

    def _inverse_frequencies(self, dim: int, max_positions: int) -> torch.Tensor:
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        if self.type == "ntk_alpha":
            return torch.reciprocal((self.theta * self.alpha ** (dim / (dim - 2))) ** exponents)
        plain: torch.Tensor = 1.0 / self.theta**exponents
        if self.type == "default":
            return plain
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        longer = max_positions > self.original_max_position_embeddings
        if self.type == "longrope":
            stretch = torch.tensor(self.long_factor if longer else self.short_factor, device="cpu")
            return torch.reciprocal(stretch * self.theta**exponents)
        if self.type == "dynamic":
            growth = max_positions / self.original_max_position_embeddings if longer else 1.0
            base = self.theta * (self.factor * growth - (self.factor - 1.0)) ** (dim / (dim - 2))
            return torch.reciprocal(base**exponents)
        return self._yarn(plain, dim)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        # Wavelengths beyond the trained context are stretched, short ones kept, and those
        # between interpolated by how many full turns they make in the trained context.
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _yarn(self, plain: torch.Tensor, dim: int) -> torch.Tensor:
        def dimension_of(turns: float) -> float:
            context = self.original_max_position_embeddings
            wavelength = math.log(context / (turns * 2 * math.pi))
            return dim * wavelength / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # a ramp of no width would divide by zero
        index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
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


def _partial_rotary_factor(outer: Fields, fields: Fields, partial: bool) -> float:
    if partial:
        beside = outer.number("partial_rotary_factor", 1.0, most=1.0)
        return fields.number("partial_rotary_factor", beside, most=1.0)
    # The other families rotate whole heads in transformers, which ignores the field or fails where
    # it says otherwise; other runtimes do as it says.
    for place in (outer, fields):
        place.choice("partial_rotary_factor", 1.0, default=1.0)
    return 1.0


def _longrope(
    rope: RopeConfig, outer: Fields, fields: Fields, original: int, max_position_embeddings: int
) -> RopeConfig:
    original = outer.integer("original_max_position_embeddings", original)
    factor = fields.number("factor", max_position_embeddings / original)
    amplitude = 1.0
    if fields.get("attention_factor") is not None:
        amplitude = fields.number("attention_factor")
    elif factor > 1.0:
        if original == 1:
            raise fields.wrong("attention_factor", "a number where the original context is 1")
        amplitude = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=amplitude,
        short_factor=fields.numbers("short_factor"),
        long_factor=fields.numbers("long_factor"),
    )


def _attention_factor(fields: Fields, factor: float) -> float:
    """YaRN's amplitude of cos and sin (its §3.4): 0.1·ln(factor) + 1 unless the file says."""

    def amplitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return amplitude(fields.number("mscale")) / amplitude(fields.number("mscale_all_dim"))
    return amplitude(1.0)
