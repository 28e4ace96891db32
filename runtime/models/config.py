"""The shape of a decoder, and what the families' `config.json` files have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .config_fields import Fields, UnsupportedModelError
from .experts.config import ExpertsConfig
from .kinds import Activation
from .norms import NormConfig
from .rope import RopeConfig

# What these ids are when a file of Llama or Mistral does not name them, in transformers.
LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}

_MOST_LAYERS = 10_000  # several are listed one by one; the deepest models have some hundred
_LONGEST_UNASKED = 2**20  # positions, whose RoPE table is made: 512 MiB for heads of 128

FULL, SLIDING = "full_attention", "sliding_attention"

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the decoder's computation, and nothing about its weights' format.

    `sliding_windows` has one entry per layer: the number of keys a query sees, itself included,
    or None for full attention. `ropes` has one per layer, too: its rotary embedding, or None for
    a layer without positions. `dtype` is that of the unquantised weights and the activations.

    `norm` says what norms there are before linear layers, and `activation` what the MLP's function
    is: of [gate | up] where its name ends with _mul, otherwise the MLP has no gate.

    With `qk_norm` heads of q and k are normalised before they are rotated, with
    `qk_norm_after_rope` afterwards.

    Queries times keys are multiplied by `attention_scale` (None: 1/sqrt(head_dim)), embeddings by
    `embedding_scale` when they are loaded, and logits by `logits_scale`. Caps c that are not 0 turn
    the former products, and logits, into c·tanh(x / c).

    With `parallel_block` attention and the MLP of a layer read the same norm, and what both return
    is added to the residual stream.

    `text_tower` says that the checkpoint holds more than this decoder, such as a vision tower.

    `experts` says which layers have a mixture of experts instead of an MLP, and what it is like.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    dtype: torch.dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: Activation = "silu_mul"
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    parallel_block: bool = False
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    qk_norm_after_rope: bool = False
    text_tower: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
            "max_position_embeddings"
        )
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise UnsupportedModelError(
                    f"{name}: got {getattr(self, name)}, expected at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads: got {self.num_heads}, expected a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim: got {self.head_dim}, expected an even number, whose halves RoPE pairs"
            )
        for name in ("sliding_windows", "ropes"):
            if (count := len(getattr(self, name))) != self.num_layers:
                raise UnsupportedModelError(
                    f"{name}: got {count} entries, expected one per layer = {self.num_layers}"
                )
        for rope in self.rotations:
            rope.check(self.head_dim)
        if self.experts is not None and len(self.experts.layers) != self.num_layers:
            raise UnsupportedModelError(
                f"experts.layers: got {len(self.experts.layers)} entries, expected one per layer = "
                f"{self.num_layers}"
            )

    @property
    def q_size(self) -> int:
        """Elements of one token's queries: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values): num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def of_rank(self, size: int) -> ModelConfig:
        """Return what each of `size` ranks computes of a model that they can divide.

        Its heads and intermediate sizes are a rank's, one KV head at least, the vocabulary is that
        of the whole model. `DecoderLayout.shard` refuses what ranks cannot divide.
        """
        experts = self.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=_of_rank(experts.intermediate_size, size),
                shared_size=experts.shared_size // size,
            )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=_of_rank(self.num_kv_heads, size),
            # Where every layer has experts no MLP has it, and it may be any number.
            intermediate_size=_of_rank(self.intermediate_size, size),
            experts=experts,
        )

    def context(self, wanted: int | None) -> int:
        """Return the longest sequence to serve: `wanted`, by default `max_position_embeddings`.

        Raises:
            ValueError: when `wanted`, the caller's `max_context`, exceeds the positions that the
                model was trained for or its RoPE is stretched to, or is None where the model has
                more than 2^20: memory grows with them, and nothing but config.json says so many.
        """
        if wanted is None:
            if self.max_position_embeddings > _LONGEST_UNASKED:
                raise ValueError(
                    f"max_context: got None, expected a number of positions, since the model's "
                    f"max_position_embeddings = {self.max_position_embeddings} is more than "
                    f"{_LONGEST_UNASKED}"
                )
            return self.max_position_embeddings
        if not 1 <= wanted <= self.longest_context:
            name = "max_position_embeddings"
            if self.longest_context > self.max_position_embeddings:
                kinds = " or ".join(dict.fromkeys(rope.type for rope in self.rotations))
                name = f"what {kinds} RoPE is stretched to"
            raise ValueError(
                f"max_context: got {wanted}, expected 1 to {name} = {self.longest_context}"
            )
        return wanted

    @property
    def longest_context(self) -> int:
        """Positions that the model was trained for, or that its RoPE is stretched to."""
        trained = self.max_position_embeddings
        return max([trained, *(rope.longest_context(trained) for rope in self.rotations)])

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings that layers have, each once."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))


def _of_rank(count: int, size: int) -> int:
    return max(1, count // size)


# What a gated MLP's function is by `hidden_act`; the first is the default.
SILU: Mapping[str, Activation] = {"silu": "silu_mul", "swish": "silu_mul"}  # one function

# The window of each layer, of the fields of config.json and the number of layers.
Windows = Callable[[Fields, int], tuple[int | None, ...]]
# Likewise the rotary embedding of each layer.
Ropes = Callable[[Fields, int], tuple[RopeConfig | None, ...]]


def read_rope(fields: Fields, **reads: bool) -> RopeConfig:
    """Return the model's rotary embedding; `reads` are the options of `RopeConfig.from_hf`.

    Raises:
        UnsupportedModelError: naming the field.
    """
    trained = fields.integer("max_position_embeddings")
    return RopeConfig.from_hf(fields.fields, trained, fields.where, **reads)


def same_rope(**reads: bool) -> Ropes:
    """Return what reads one rotary embedding for all layers; `reads` as of `read_rope`."""

    def ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig, ...]:
        return (read_rope(fields, **reads),) * num_layers

    return ropes


def ropes_of_kinds(
    fields: Fields, kinds: Sequence[str], **sliding: float
) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding of each layer where they differ by the kind of attention.

    transformers 5 has an object for each kind in `rope_parameters`. Before, the fields of RoPE were
    those of full attention, and sliding attention was not scaled.

    Args:
        fields: of config.json, with the family's defaults.
        kinds: of each layer, "full_attention" or "sliding_attention".
        sliding: fields of sliding attention that differ where `rope_parameters` does not say.

    Raises:
        UnsupportedModelError: naming the field.
    """
    of_kind = {FULL: dict(fields.fields), SLIDING: {**fields.fields, "rope_scaling": None}}
    of_kind[SLIDING].update(sliding)
    if fields.get("rope_parameters") is not None:
        nested = fields.child("rope_parameters")
        nested.only(*of_kind)
        for kind, read in of_kind.items():
            read["rope_parameters"] = nested.get(kind)
    made = {kind: read_rope(Fields(fields.where, read)) for kind, read in of_kind.items()}
    return tuple(made[kind] for kind in kinds)


def standard_config(
    fields: Fields,
    *,
    windows: Windows,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool = False,
    mlp_bias: bool | None = None,
    ropes: Ropes | None = None,
    norm: NormConfig | None = None,
    activations: Mapping[str, Activation] = SILU,
    activation_field: str = "hidden_act",
) -> ModelConfig:
    """Read what the families have in common.

    Args:
        fields: of config.json, with the family's defaults.
        windows: reads the sliding windows.
        qkv_bias: whether the projections to q, k and v have a bias.
        o_bias: whether the output projection of attention has one.
        qk_norm: whether heads of q and k are normalised.
        mlp_bias: whether the projections of the MLP have a bias; None: `mlp_bias` of the file.
        ropes: reads the rotary embeddings; by default one of whole heads for all layers.
        norm: the norms; by default RMS norms with the file's `rms_norm_eps`.
        activations: what the MLP's function is by the file's `activation_field`, of which the
            first is the default.
        activation_field: which names it.

    Raises:
        UnsupportedModelError: naming the field.
    """
    named = fields.choice(activation_field, *activations, default=next(iter(activations)))
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers", most=_MOST_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings")
    last_id = vocab_size - 1
    return ModelConfig(
        family=fields.get("model_type"),
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(fields),
        norm=norm or NormConfig(fields.number("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=fields.boolean("mlp_bias", False) if mlp_bias is None else mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=windows(fields, num_layers),
        ropes=(ropes or same_rope())(fields, num_layers),
        dtype=_dtype(fields),
        bos_token_id=_bos(fields, last_id),
        eos_token_ids=fields.integers("eos_token_id", least=0, most=last_id),
        activation=activations[named],
    )


def _bos(fields: Fields, last_id: int) -> int | None:
    """Return the token before a text; None where the file names one that the model lacks.

    Some files say -1 for none, or keep the token of the model that theirs was made from.
    """
    written = fields.optional_integer("bos_token_id", least=-(2**31))
    return None if written is None or not 0 <= written <= last_id else written


def _head_dim(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.wrong(
            "hidden_size", f"a multiple of num_attention_heads = {num_heads} without a head_dim"
        )
    return hidden_size // num_heads


def _dtype(fields: Fields) -> torch.dtype:
    spelling = "torch_dtype" if fields.get("dtype") is None else "dtype"
    return _DTYPES[fields.choice(spelling, *_DTYPES, default="float32")]


def full_attention(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return no window for any layer; `layer_types` must agree."""
    return uniform_window(fields, num_layers, None)


def uniform_window(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Return the same window, or none, for every layer; `layer_types` must agree."""
    kind = FULL if window is None else SLIDING
    written = fields.strings("layer_types") or (kind,) * num_layers
    if written != (kind,) * num_layers:
        raise fields.wrong("layer_types", f"{num_layers} times {kind!r}")
    return (window,) * num_layers


def layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return whether each layer's attention is full or sliding; () when the file does not say.

    Raises:
        UnsupportedModelError: for another kind, or another number of layers.
    """
    written = fields.strings("layer_types")
    if written and (len(written) != num_layers or not set(written) <= {FULL, SLIDING}):
        raise fields.wrong("layer_types", f"{num_layers} times {FULL!r} or {SLIDING!r}")
    return written


def windows_of_kinds(fields: Fields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer whose attention is sliding, which then must be written."""
    window = fields.integer("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def mixed_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return a window for some layers, where `use_sliding_window` says so."""
    window = None
    if fields.boolean("use_sliding_window", False):
        fields.require("sliding_window")
        window = fields.optional_integer("sliding_window")
    if window is None:
        return full_attention(fields, num_layers)
    written = layer_types(fields, num_layers)
    if not written:
        first = fields.integer("max_window_layers", least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in written)
