"""Linear layers in the two precisions a checkpoint may hold: 16/32-bit, and W8A8.

`n_active`, int32 [1] on the device, says how many rows are real, for layers that can leave out the
others; see `ops.w8a8_linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Protocol, TypeGuard

import torch

from .. import ops
from ..jit.variant import Variant
from ..ops.collective.partial_sum import PartialSum
from ..ops.common.device import has_kernel
from ..ops.linear.gemm_variants import GemmTiled
from ..ops.linear.linear import runs_dense_kernel
from ..ops.linear.precompile import dense_layer_kernels, layer_kernels
from ..ops.linear.quantize_cuda import GATED, input_kernel
from .kinds import Activation, InputKind
from .norms import Addend, Norm


@dataclass(frozen=True)
class Sampling:
    """Parameters that say which rows of logits are greedy, [M] fp32 each (see `ops.sample`)."""

    temperature: torch.Tensor
    repetition_penalty: torch.Tensor


class Layer(Protocol):
    """A linear layer y = x·Wᵀ + b [M, N] of x [M, K], or a rank's part of y.

    `n_active`, int32 [1] on the device, says how many rows are real; layers may leave out the rest.
    A layer that is a dataclass inherits what is not its own.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype in which the weight is stored."""

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> Addend:
        """Map x [M, K] to [M, N]."""

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> Addend:
        """Apply the layer to what an activation function makes of x [M, K], or [M, 2K] if gated.

        What x holds afterwards is undefined.
        """

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of the layer."""
        return tensors_of(self)

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        """Return the kernels that the layer launches for any number of rows, on its GPU or an H200.

        Args:
            kind: what comes before it.
            dtype: of x.
        """


class Linear(Layer, Protocol):
    """A linear layer of which this process has the results, however its weight is stored."""

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [M, K] to [M, N]."""

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `residual` [M, K] to x [M, K], normalise the sum, apply the layer.

        Returns (y [M, N], the sum [M, K]); without a residual the sum is x itself.
        """

    def logits_after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        sampling: Sampling,
        n_active: torch.Tensor | None = None,
    ) -> ops.Logits:
        """Do as `after_norm`; return logits in fp32 of which greedy rows may be undefined."""
        return ops.Logits(self.after_norm(x, residual, norm, n_active)[0].float())

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Do as `Layer.after_activation`."""

    def scaled(self, norm: Norm, factor: float) -> tuple[Linear, Norm]:
        """Return a layer and the norm before it, for results times `factor`.

        Raises:
            ValueError: for a layer with a bias.
        """

    def with_factors(self, factors: torch.Tensor) -> Linear | None:
        """Return a layer with results times `factors` [N] (fp32), None where rows have no scale."""
        return self if factors.eq(1).all() else None


@dataclass
class DenseLinear(Linear):
    """y = x·Wᵀ + b with 16- or 32-bit weights.

    `weight` [N, K] in x's dtype, packed for GPUs with kernels for it: a plain one is packed here.
    Weight and bias are constants from then on (see `ops.linear`). `bias` [N] in `out_dtype`, which
    is x's dtype (None) or fp32, as logits are wanted.
    """

    weight: torch.Tensor | ops.PackedWeight
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weight, torch.Tensor) and runs_dense_kernel(self.weight):
            self.weight = ops.pack_weight(self.weight)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        """Return the norm or activation before the layer, and what multiplies."""
        device = self.weight.device if self.weight.device.type == "cuda" else None
        return dense_kernels(kind, self.shape, dtype, out_dtype=self.out_dtype, device=device)

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(
            x, self.weight, bias=self.bias, n_active=n_active, out_dtype=self.out_dtype
        )

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm.of_sum(x, residual)
        return self(normed, n_active), total

    def logits_after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        sampling: Sampling,
        n_active: torch.Tensor | None = None,
    ) -> ops.Logits:
        if self.out_dtype is not torch.float32:
            return super().logits_after_norm(x, residual, norm, sampling, n_active)
        return ops.linear_logits(
            norm.of_sum(x, residual)[0],
            self.weight,
            temperature=sampling.temperature,
            repetition_penalty=sampling.repetition_penalty,
            bias=self.bias,
            n_active=n_active,
        )

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self(ops.activation(x, kind), n_active)

    def scaled(self, norm: Norm, factor: float) -> tuple[Linear, Norm]:
        require_no_bias(self.bias)
        # The layer's weight may be the embedding.
        return self, norm.scaled(factor)


@dataclass
class W8A8Linear(Linear):
    """y = s_x·s_w·(q_x·Wᵀ) + b with 8-bit weights and activations quantised on the way in.

    `weight` [N, K] int8 or float8_e4m3fn, packed for GPUs with GEMM kernels: a plain one is packed
    here. All tensors are constants from then on (see `ops.w8a8_linear`). `weight_scale` [N] fp32;
    `bias` [N] in `out_dtype`. Activations are quantised per token at run time, or by the fixed fp32
    scalar `input_scale` (with `input_zero_point`, an int32 scalar, for asymmetric INT8;
    `weight_sum` [N] int32 then holds the row sums of `weight`).

    `batch_invariant` keeps a token's bits from depending on the other tokens of the call, in FP8
    too, at the price of the faster kernel for up to 16 tokens.
    """

    weight: torch.Tensor | ops.PackedWeight
    weight_scale: torch.Tensor
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    input_zero_point: torch.Tensor | None = None
    weight_sum: torch.Tensor | None = None
    batch_invariant: bool = True
    # Whether activations get a zero point per token as well (`AsymmetricLinear`).
    _asymmetric: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.weight, torch.Tensor) and has_kernel(GemmTiled, self.weight):
            self.weight = ops.pack_weight(self.weight)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        """Return the kernels that quantise x and multiply it, for any number of rows."""
        device = self.weight_scale.device
        return layer_kernels(
            kind,
            self.shape,
            self.weight_dtype,
            dtype,
            out_dtype=self.out_dtype,
            batch_invariant=self.batch_invariant,
            asymmetric=self._asymmetric,
            device=device if device.type == "cuda" else None,
        )

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [M, K] (16- or 32-bit) to [M, N] in `out_dtype`."""
        if self.input_scale is None:
            return ops.dynamic_w8a8_linear(
                x,
                self.weight,
                self.weight_scale,
                bias=self.bias,
                n_active=n_active,
                out_dtype=self.out_dtype,
                batch_invariant=self.batch_invariant,
            )
        scale = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        quantized = ops.quantize_per_tensor(
            x,
            self.input_scale,
            self.weight.dtype,
            zero_point=self.input_zero_point,
            n_active=n_active,
            scale_out=scale,
        )
        return self._matmul(quantized, scale, n_active)

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fused = self.input_scale is None and norm.kind == "rms_norm"
        if fused and not isinstance(x, PartialSum):
            y, *sums = ops.rms_norm_w8a8_linear(
                x,
                norm.weight,
                norm.eps,
                self.weight,
                self.weight_scale,
                residual=residual,
                bias=self.bias,
                n_active=n_active,
                out_dtype=self.out_dtype,
                batch_invariant=self.batch_invariant,
            )
            return y, sums[0] if sums else x
        quantized, scale, total = norm.quantize(
            x,
            residual,
            self.weight.dtype,
            scale=self.input_scale,
            zero_point=self.input_zero_point,
            n_active=n_active,
        )
        return self._matmul(quantized, scale, n_active), total

    def logits_after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        sampling: Sampling,
        n_active: torch.Tensor | None = None,
    ) -> ops.Logits:
        fused = self.input_scale is None and norm.kind == "rms_norm" and not self._asymmetric
        fused = fused and self.out_dtype is torch.float32
        if not fused or isinstance(x, PartialSum):
            return super().logits_after_norm(x, residual, norm, sampling, n_active)
        return ops.rms_norm_w8a8_logits(
            x,
            norm.weight,
            norm.eps,
            self.weight,
            self.weight_scale,
            temperature=sampling.temperature,
            repetition_penalty=sampling.repetition_penalty,
            residual=residual,
            bias=self.bias,
            n_active=n_active,
            batch_invariant=self.batch_invariant,
        )

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        quantized, scale = ops.activation_quantize(
            x,
            kind,
            self.weight.dtype,
            scale=self.input_scale,
            zero_point=self.input_zero_point,
            n_active=n_active,
            discard_x=True,
        )
        return self._matmul(quantized, scale, n_active)

    def scaled(self, norm: Norm, factor: float) -> tuple[Linear, Norm]:
        require_no_bias(self.bias)
        return replace(self, weight_scale=self.weight_scale * factor), norm

    def with_factors(self, factors: torch.Tensor) -> Linear:
        factors = factors.to(self.weight_scale.device)
        bias = None if self.bias is None else (self.bias.float() * factors).to(self.bias.dtype)
        return replace(self, weight_scale=self.weight_scale * factors, bias=bias)

    def _matmul(
        self,
        quantized: torch.Tensor,
        scale: torch.Tensor,
        n_active: torch.Tensor | None,
        zero_point: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return ops.w8a8_linear(
            quantized,
            self.weight,
            scale,
            self.weight_scale,
            bias=self.bias,
            x_zero_point=self.input_zero_point if zero_point is None else zero_point,
            w_sum=self.weight_sum,
            n_active=n_active,
            out_dtype=self.out_dtype,
            batch_invariant=self.batch_invariant,
        )


def mlp_after_norm(
    gate_up: Linear,
    down: Layer,
    x: Addend,
    residual: torch.Tensor | None,
    norm: Norm,
    kind: Activation,
    n_active: torch.Tensor | None = None,
) -> tuple[Addend, torch.Tensor]:
    """Add `residual` [M, K] to x [M, K], normalise the sum, apply both layers of an MLP.

    Returns (y [M, N], the sum [M, K]); without a residual the sum is x itself.
    """
    if (
        isinstance(x, PartialSum)
        or norm.kind != "rms_norm"
        or kind not in GATED
        or not (_quantizes_tokens(gate_up) and _quantizes_tokens(down))
        or (gate_up.out_dtype, gate_up.batch_invariant) != (down.out_dtype, down.batch_invariant)
        or gate_up.weight_dtype is not down.weight_dtype
    ):
        made, total = gate_up.after_norm(x, residual, norm, n_active)
        return down.after_activation(made, kind, n_active), total
    y, *sums = ops.rms_norm_w8a8_mlp(
        *(x, norm.weight, norm.eps, gate_up.weight, gate_up.weight_scale),
        *(down.weight, down.weight_scale, kind),
        residual=residual,
        gate_up_bias=gate_up.bias,
        down_bias=down.bias,
        n_active=n_active,
        out_dtype=down.out_dtype,
        batch_invariant=down.batch_invariant,
    )
    return y, sums[0] if sums else x


def _quantizes_tokens(layer: Layer) -> TypeGuard[W8A8Linear]:
    """Return whether a layer makes 8-bit rows of its input that have one scale each."""
    return type(layer) is W8A8Linear and layer.input_scale is None


def require_no_bias(bias: torch.Tensor | None) -> None:
    """Check that a layer whose results are to be scaled has no bias."""
    if bias is not None:
        raise ValueError("bias: got a tensor, expected None in a layer whose results are scaled")


def dense_kernels(
    kind: InputKind,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[Variant]:
    """Return what a layer with 16- or 32-bit weights launches of ours.

    Args:
        kind: what comes before the layer: a norm or an activation is a kernel of its own.
        shape: [N, K] of the weight.
        dtype: of the model.
        out_dtype: of the layer's output; by default that of its input.
        device: the GPU, whose size and tuned choices count; None for an H200 as the table has it.
    """
    before = [] if kind == "per_token" else [input_kernel(kind, dtype, dtype)]
    return [*before, *dense_layer_kernels(shape, dtype, out_dtype=out_dtype, device=device)]


def tensors_of(part: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a dataclass, and of dataclasses, layers and tuples within it."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_of(item)
    elif hasattr(part, "__dataclass_fields__"):
        for field in fields(part):  # type: ignore[arg-type]
            yield from tensors_of(getattr(part, field.name))
