"""The roofline of a decode step: memory at its best speed, or tensor cores at theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...models import Decoder, KVFormat, Linear
from ...models.experts.config import ExpertsConfig
from ...models.experts.products import Experts
from .breakdown import ATTENTION
from .work import attention_flops, expected_experts, kv_bytes


@dataclass(frozen=True)
class Roofline:
    """The peak rates of a GPU.

    Args:
        bytes_s: bytes read from device memory per second, as measured.
        flop_s: operations of the tensor cores per second, by the bytes of an operand.
    """

    bytes_s: float
    flop_s: Mapping[int, float]

    def seconds(self, num_bytes: float, flops: float, width: int) -> float:
        """Return the longer of reading and multiplying, with operands of so many bytes."""
        return max(num_bytes / self.bytes_s, flops / self.flop_s[width])


# Reading: the most that was measured (docs/notebooks/decode_step.md, docs/results/h100/gemm.json).
# Tensor cores: NVIDIA's data sheets, without sparsity.
_FLOP_S = {1: 1979e12, 2: 989.5e12}
_ROOFLINES = {
    "NVIDIA H200": Roofline(4.5e12, _FLOP_S),
    "NVIDIA H100 80GB HBM3": Roofline(3.15e12, _FLOP_S),
}


@dataclass(frozen=True)
class RooflineTime:
    """The shortest time of one kernel: what it reads from device memory, and how long that takes.

    Args:
        seconds: the longer of reading and multiplying.
        num_bytes: weights, or keys and values. What kernels hand to each other stays in the L2.
    """

    seconds: float
    num_bytes: float


def roofline_of(device: torch.device) -> Roofline | None:
    """Return a GPU's roofline; None where none is known."""
    if device.type != "cuda":
        return None
    return _ROOFLINES.get(torch.cuda.get_device_name(device))


def kernel_rooflines(
    model: Decoder,
    batch: int,
    context: int,
    roofline: Roofline,
    cache_format: KVFormat | None = None,
) -> dict[str, tuple[int, RooflineTime]]:
    """Return the launches and the roofline of each kernel that reads weights or the cache.

    Args:
        model: the decoder.
        batch: sequences of one new token each.
        context: keys of each, the new one's included.
        roofline: of the GPU.
        cache_format: of the KV cache; None is the model's dtype.

    Returns:
        By the names of `breakdown.sites_of`; attention is the mean of the layers.
    """
    layers = model.config.num_layers
    kernels: dict[str, tuple[int, RooflineTime]] = {}
    for use in model.linears():
        count, _ = kernels.get(use.name, (0, None))
        kernels[use.name] = (count + 1, _product(use.linear, batch, roofline))
    config = model.config.experts
    for grouped in model.experts():
        assert config is not None, "a layer has experts"
        count, _ = kernels.get(grouped.name, (0, None))
        kernels[grouped.name] = (count + 1, _grouped(grouped.experts, config, batch, roofline))
    num_bytes = kv_bytes(model.config, batch, context, cache_format) / layers
    flops = attention_flops(model.config, batch, context) / layers
    kernels[ATTENTION] = (layers, RooflineTime(roofline.seconds(num_bytes, flops, 2), num_bytes))
    return kernels


def step_roofline(kernels: Mapping[str, tuple[int, RooflineTime]]) -> float:
    """Return the sum of the rooflines of a step's kernels, in seconds."""
    return sum(count * kernel.seconds for count, kernel in kernels.values())


def _product(linear: Linear, batch: int, roofline: Roofline) -> RooflineTime:
    n, k = linear.shape
    return _time(n * k, batch * n * k, linear.weight_dtype.itemsize, roofline)


def _grouped(
    experts: Experts, config: ExpertsConfig, batch: int, roofline: Roofline
) -> RooflineTime:
    """Return the roofline of the products of a layer's experts, chosen evenly at random."""
    n, k = experts.shape
    width = experts.weight_dtype.itemsize
    rows = batch * config.top_k
    return _time(expected_experts(config, batch) * n * k, rows * n * k, width, roofline)


def _time(weights: float, products: int, width: int, roofline: Roofline) -> RooflineTime:
    num_bytes = weights * width
    # fp32 weights multiply as two bf16 numbers at best; no model here has them on a GPU.
    return RooflineTime(roofline.seconds(num_bytes, 2 * products, min(width, 2)), num_bytes)
