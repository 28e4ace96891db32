"""A model with FP8 weights in blocks: what multiplies in its graphs on a GPU, and its tokens."""

from __future__ import annotations

import re

import pytest
import torch

from ostinato import ops
from ostinato.checkpoint.weights import quantize_weight_blocks
from ostinato.engine import Engine, SamplingParams
from ostinato.models import BlockFP8Linear, DenseLinear
from ostinato.models.families.llama import Llama
from tiny import byte_tokenizer, tiny_llama

# In names of cuBLAS's, CUTLASS's and torch's kernels of products, and of ours.
_PRODUCTS = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|dot_kernel", re.IGNORECASE)


def in_blocks(device: torch.device) -> Llama:
    sizes = {"hidden_size": 192, "intermediate_size": 208, "head_dim": 48}
    model = tiny_llama(device, dtype=torch.bfloat16, **sizes)
    for layer in model.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            dense = getattr(layer, name)
            assert isinstance(dense, DenseLinear)
            weight = dense.weight
            if isinstance(weight, ops.PackedWeight):
                weight = weight.unpack()
            codes, blocks = quantize_weight_blocks(weight, torch.float32)
            scale = ops.channel_scales([(blocks, slice(0, codes.size(0)))])
            setattr(layer, name, BlockFP8Linear(codes, scale, torch.bfloat16))
    return model


def engine_of(device: torch.device) -> Engine:
    model = in_blocks(device)
    return Engine(model, byte_tokenizer(), max_batch=20, page_size=16, prefill_chunk=64)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.nvcc
def test_our_kernels_alone_multiply_in_every_graph() -> None:
    engine = engine_of(torch.device("cuda"))
    report = engine.capture([1, 4, 20], progress=False)
    assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
    layers = engine.model.config.num_layers
    for graph in report.graphs:
        assert graph.kernels is not None
        products = {name: n for name, n in graph.kernels.items() if _PRODUCTS.search(name)}
        assert all("tiled_gemm" in name for name in products), graph.key
        # Prompts have logits of their last tokens alone, outside of the graph.
        of_head = 0 if graph.variant else 1
        assert sum(products.values()) == 4 * layers + of_head, graph.key


def test_a_sequence_has_the_tokens_it_has_alone(device: torch.device) -> None:
    engine = engine_of(device)
    engine.capture([1, 4, 20], progress=False)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[7 + i] * (3 + 3 * i) for i in range(20)]
    together = [completion.token_ids for completion in engine.generate(prompts, params)]
    for prompt, tokens in zip(prompts[::6], together[::6], strict=True):
        (alone,) = engine.generate([prompt], params)
        assert alone.token_ids == tokens
