"""Which tensors a checkpoint of a model must hold, in the names of Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..models import ModelConfig
from .errors import UnsupportedCheckpointError
from .scheme import LinearScheme, SchemeOf

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EMBEDDING = "model.embed_tokens.weight"
_ZERO_POINT_DTYPES = (torch.int8, torch.int32)

# Scalars are stored as [] or [1] by one writer or another, channel scales as [N, 1] or [N].
_SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((1,), ())


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the checkpoint: its possible names, shapes and dtypes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = DENSE_DTYPES
    required: bool = True

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model uses."""
        return self.shapes[0]


@dataclass(frozen=True)
class Projection:
    """One linear module of the checkpoint: y = x·Wᵀ (+ b), W [rows, columns]."""

    name: str
    rows: int
    columns: int
    has_bias: bool
    scheme: LinearScheme | None

    @property
    def weight(self) -> TensorSpec:
        dtypes = (self.scheme.dtype,) if self.scheme else DENSE_DTYPES
        return TensorSpec((f"{self.name}.weight",), ((self.rows, self.columns),), dtypes)

    @property
    def bias(self) -> TensorSpec | None:
        if not self.has_bias:
            return None
        return TensorSpec((f"{self.name}.bias",), ((self.rows,),))

    @property
    def weight_scale(self) -> TensorSpec | None:
        if self.scheme is None:
            return None
        per_channel = ((self.rows, 1), (self.rows,))
        shapes = per_channel if self.scheme.per_channel else _SCALAR_SHAPES
        return TensorSpec(self._spellings("weight_scale", "weight_scale_inv"), shapes)

    @property
    def input_scale(self) -> TensorSpec | None:
        if self.scheme is None or not self.scheme.static_input:
            return None
        return TensorSpec(self._spellings("input_scale", "activation_scale"), _SCALAR_SHAPES)

    @property
    def input_zero_point(self) -> TensorSpec | None:
        if self.scheme is None or self.scheme.symmetric_input:
            return None
        return self._zero_point("input_zero_point", _SCALAR_SHAPES, required=True)

    @property
    def unused_zero_points(self) -> tuple[TensorSpec, ...]:
        """Zero points of symmetric quantisation, which some writers store: all of them 0."""
        if self.scheme is None or self.scheme.dtype is not torch.int8:
            return ()
        shapes = (*_SCALAR_SHAPES, (self.rows, 1), (self.rows,))
        specs = [self._zero_point("weight_zero_point", shapes, required=False)]
        if self.scheme.static_input and self.scheme.symmetric_input:
            specs.append(self._zero_point("input_zero_point", _SCALAR_SHAPES, required=False))
        return tuple(specs)

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor of the module."""
        single = (
            self.weight,
            self.weight_scale,
            self.input_scale,
            self.input_zero_point,
            self.bias,
        )
        yield from (spec for spec in single if spec is not None)
        yield from self.unused_zero_points

    def _spellings(self, *suffixes: str) -> tuple[str, ...]:
        # The second spelling is that of transformers' own FP8; both are factors, not divisors.
        return tuple(f"{self.name}.{suffix}" for suffix in suffixes)

    def _zero_point(
        self, suffix: str, shapes: tuple[tuple[int, ...], ...], *, required: bool
    ) -> TensorSpec:
        return TensorSpec((f"{self.name}.{suffix}",), shapes, _ZERO_POINT_DTYPES, required)


# The modules whose rows, one after another, make one linear layer of the model.
Fused = tuple[Projection, ...]


@dataclass(frozen=True)
class LayerLayout:
    """The tensors of one decoder layer."""

    input_norm: TensorSpec
    qkv: Fused
    o: Fused
    post_attention_norm: TensorSpec
    gate_up: Fused
    down: Fused
    q_norm: TensorSpec | None
    k_norm: TensorSpec | None

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor of the layer."""
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_attention_norm)
        yield from (spec for spec in norms if spec is not None)
        for projection in self.projections():
            yield from projection.tensors()

    def projections(self) -> Iterator[Projection]:
        """Yield every linear module of the layer."""
        for fused in (self.qkv, self.o, self.gate_up, self.down):
            yield from fused


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model. With tied embeddings `lm_head` is None.

    `tied_output` is the copy of the embedding that a file with tied embeddings may hold.
    """

    embedding: TensorSpec
    layers: tuple[LayerLayout, ...]
    norm: TensorSpec
    lm_head: Projection | None
    tied_output: TensorSpec | None

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor, in the order in which the model uses them."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.tensors()
        yield self.norm
        if self.lm_head is not None:
            yield from self.lm_head.tensors()
        if self.tied_output is not None:
            yield self.tied_output

    def projections(self) -> Iterator[Projection]:
        """Yield every linear module."""
        for layer in self.layers:
            yield from layer.projections()
        if self.lm_head is not None:
            yield self.lm_head


def model_layout(config: ModelConfig, scheme_of: SchemeOf) -> ModelLayout:
    """Return the tensors of a checkpoint whose linear modules are stored as `scheme_of` says.

    Raises:
        UnsupportedCheckpointError: naming the modules, when modules that the model fuses are
            stored in different ways, or an output projection tied to the embedding is quantised.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    lm_head = Projection("lm_head", *vocabulary, False, scheme_of("lm_head"))
    if config.tie_word_embeddings and lm_head.scheme is not None:
        raise UnsupportedCheckpointError(
            "lm_head: the checkpoint quantises it, but tie_word_embeddings shares its weight "
            "with the embedding, which is not quantised; expected lm_head to be ignored"
        )
    tied = config.tie_word_embeddings
    return ModelLayout(
        embedding=TensorSpec((EMBEDDING,), (vocabulary,)),
        layers=tuple(_layer(config, index, scheme_of) for index in range(config.num_layers)),
        norm=TensorSpec(("model.norm.weight",), ((config.hidden_size,),)),
        lm_head=None if tied else lm_head,
        tied_output=(
            TensorSpec(("lm_head.weight",), (vocabulary,), required=False) if tied else None
        ),
    )


def _layer(config: ModelConfig, index: int, scheme_of: SchemeOf) -> LayerLayout:
    prefix = f"model.layers.{index}."
    hidden, intermediate = config.hidden_size, config.intermediate_size

    def norm(name: str, size: int) -> TensorSpec:
        return TensorSpec((f"{prefix}{name}.weight",), ((size,),))

    def linear(name: str, rows: int, columns: int, bias: bool) -> Projection:
        return Projection(prefix + name, rows, columns, bias, scheme_of(prefix + name))

    return LayerLayout(
        input_norm=norm("input_layernorm", hidden),
        qkv=_fused(
            linear("self_attn.q_proj", config.q_size, hidden, config.qkv_bias),
            linear("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias),
            linear("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias),
        ),
        o=_fused(linear("self_attn.o_proj", hidden, config.q_size, config.o_bias)),
        post_attention_norm=norm("post_attention_layernorm", hidden),
        gate_up=_fused(
            linear("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
            linear("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ),
        down=_fused(linear("mlp.down_proj", hidden, intermediate, config.mlp_bias)),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
    )


def _fused(*projections: Projection) -> Fused:
    if len({projection.scheme for projection in projections}) > 1:
        stored = "; ".join(f"{part.name}: {part.scheme or 'not quantised'}" for part in projections)
        raise UnsupportedCheckpointError(
            f"modules that the model fuses are stored in different ways: {stored}"
        )
    return projections
