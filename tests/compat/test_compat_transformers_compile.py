"""Replaced linear modules inside functions that torch.compile has compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from effort import effort
from ostinato import ops
from ostinato.compat.transformers import QuantizedLinear
from ostinato.models import BlockFP8Linear, W8A8Linear
from ostinato.models.asymmetric_linear import AsymmetricLinear

N, K = 64, 256


def layers(device: torch.device) -> dict[str, Any]:
    """Return a layer of each kind whose weight lies in the order of kernels."""
    codes = torch.randint(-99, 99, (N, K), dtype=torch.int8).to(device)
    packed, of_fp8 = ops.pack_weight(codes), ops.pack_weight(codes.to(torch.float8_e4m3fn))
    scale, bias = torch.rand(N).to(device), torch.randn(N).to(device, torch.bfloat16)
    blocks = torch.rand(K // 128, N // 8).to(device)
    half = torch.tensor(0.05, device=device)
    sums = codes.sum(1, dtype=torch.int32)
    bf16 = torch.bfloat16
    return {
        "dynamic": W8A8Linear(packed, scale, bf16, bias),
        "static": W8A8Linear(packed, scale, bf16, bias, input_scale=half),
        "zero points": AsymmetricLinear(packed, scale, bf16, weight_sum=sums),
        "blocks": BlockFP8Linear(of_fp8, blocks, bf16, bias),
    }


@pytest.mark.parametrize(
    "kind", effort(["dynamic"], ["dynamic", "static", "zero points", "blocks"])
)
def test_a_replaced_module_is_compiled_whole(kind: str, device: torch.device) -> None:
    module = QuantizedLinear(layers(device)[kind], torch.bfloat16, torch.rand(K).to(device))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for _ in range(2):
        x = torch.randn(2, 3, K).to(device, torch.bfloat16)
        assert torch.equal(compiled(x), module(x))
    assert counter.frame_count == 1
    # Graphs of torch copy what they are given before each replay, but for such tensors.
    tensors = list(module.buffers())
    assert len(tensors) == len(list(module.layer.tensors())) + 1
    assert all(hasattr(tensor, "_dynamo_static_input_type") for tensor in tensors)
