"""What multiplies in a captured step and prompt: our kernels alone, for models of 16 bits."""

from __future__ import annotations

import re

import pytest
import torch

from ostinato.engine import Engine, SamplingParams
from tiny import byte_tokenizer, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

# In names of cuBLAS's, CUTLASS's and torch's kernels of products.
_PRODUCTS = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|dot_kernel", re.IGNORECASE)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_graph_of_a_16_bit_model_has_a_product_of_torch(dtype: torch.dtype) -> None:
    model = tiny_llama("cuda", dtype=dtype, head_dim=16)
    engine = Engine(model, byte_tokenizer(), max_batch=20, page_size=16, prefill_chunk=64)
    report = engine.capture([1, 4, 20], progress=False)
    assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
    layers = len(model.layers)
    for graph in report.graphs:
        assert graph.kernels is not None
        products = {name: n for name, n in graph.kernels.items() if _PRODUCTS.search(name)}
        assert products, graph.key
        assert all("tiled_gemm" in name for name in products), graph.key
        # Prompts have logits of their last tokens alone, outside of the graph.
        of_head = 0 if graph.variant else 1
        assert sum(products.values()) == 4 * layers + of_head, graph.key


def test_a_sequence_has_the_tokens_it_has_alone() -> None:
    model = tiny_llama("cuda", dtype=torch.bfloat16, head_dim=16)
    engine = Engine(model, byte_tokenizer(), max_batch=20, page_size=16, prefill_chunk=64)
    engine.capture([1, 4, 20], progress=False)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[7 + i] * (3 + 5 * i) for i in range(20)]
    together = [completion.token_ids for completion in engine.generate(prompts, params)]
    for prompt, tokens in zip(prompts[::6], together[::6], strict=True):
        (alone,) = engine.generate([prompt], params)
        assert alone.token_ids == tokens
