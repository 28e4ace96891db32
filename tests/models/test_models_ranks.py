"""Ranks that divide a model compute its logits, alike; threads have the bits of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, SHAPE, TOKENS, random_model, save_plain
from quantized_files import FORMATS, write_quantized
from rank_models import TIMEOUT_S, load_ranks, logits_of_processes, logits_of_ranks, rank_logits
from transformers import LlamaConfig

from effort import effort
from ostinato.bench.weights import random_decoder
from ostinato.checkpoint import load_model
from ostinato.cli.build import _model_kernels
from ostinato.models import (
    Decoder,
    PagedKVCache,
    Sampling,
    SeenRows,
    UnsupportedModelError,
    read_config,
    sequence_logits,
)
from ostinato.models.scoring import sequence_inputs
from ostinato.ops.collective.communicator import Communicator, local_communicators, run_ranks

# Eight heads, two KV heads that four and eight ranks keep twice, and a vocabulary of which the last
# rank has fewer rows.
WIDE = LlamaConfig(**{**SHAPE, "num_attention_heads": 8, "hidden_size": 64}, attention_bias=True)
OF_EACH_FAMILY = list({config.model_type: name for name, config in MODELS.items()}.values())
TOLERANCE = 1e-4  # as of logits in fp32 against transformers


@pytest.mark.parametrize("size", effort([2], [2, 4]))
@pytest.mark.parametrize("name", effort(OF_EACH_FAMILY, list(MODELS)))
def test_ranks_compute_the_logits_of_one(
    name: str, size: int, device: torch.device, tmp_path: Path
) -> None:
    folder = save_plain(tmp_path, random_model(MODELS[name]))
    expected = sequence_logits(load_model(folder, device=device), TOKENS)
    found = logits_of_ranks(folder, size, TOKENS, device=device)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", effort([4], [2, 4, 8]))
def test_kv_heads_and_vocabulary_need_not_divide(size: int, tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**{**WIDE.to_dict(), "tie_word_embeddings": tied})
    folder = save_plain(tmp_path, random_model(config))
    expected = sequence_logits(load_model(folder), TOKENS)
    ranks = load_ranks(folder, size)
    assert {rank.config.num_kv_heads for rank in ranks} == {max(1, 2 // size)}
    first, *others = rank_logits(ranks, TOKENS)
    assert all(torch.equal(first, other) for other in others)
    assert (first - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", effort([2], [2, 4, 8]))
@pytest.mark.parametrize("dtype", effort([torch.bfloat16], [torch.bfloat16, torch.float32]))
def test_processes_compute_the_bits_of_threads(
    dtype: torch.dtype, size: int, tmp_path: Path
) -> None:
    folder = save_plain(tmp_path, random_model(WIDE), dtype)
    expected = logits_of_ranks(folder, size, TOKENS)
    for found in logits_of_processes(folder, size, TOKENS):
        assert torch.equal(found, expected)


def test_one_rank_is_a_model_of_its_own(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["phi3"]))
    (rank,) = load_ranks(folder, 1)
    assert rank.communicator is None
    assert torch.equal(sequence_logits(rank, TOKENS), sequence_logits(load_model(folder), TOKENS))


def inputs_of(model: Decoder) -> tuple[Any, ...]:
    """Return what a decoder takes for a sequence of `TOKENS`, and its cache."""
    cache = PagedKVCache.for_model(model.config, num_pages=4, page_size=16, device="cpu")
    return (*sequence_inputs(cache, TOKENS), cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "olmo2", "qwen2_moe"])
def test_every_way_to_logits_has_the_same_bits(name: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS[name]))
    models = {rank.communicator: rank for rank in load_ranks(folder, 2)}
    vocab_size, count = SHAPE["vocab_size"], len(TOKENS)

    @torch.inference_mode()
    def compute(rank: Communicator) -> dict[str, torch.Tensor]:
        model = models[rank]
        called = model(*inputs_of(model))
        x, residual = model.hidden(*inputs_of(model))
        rows = torch.tensor([3, count - 1])
        seen = torch.zeros(2, vocab_size, dtype=torch.bool)
        marked = SeenRows(seen, torch.arange(count) % 2)
        # Logits of greedy rows may be undefined.
        sampling = Sampling(torch.ones(count), torch.ones(count))
        sampled = model.logits_to_sample(*inputs_of(model), sampling, seen=marked).values
        assert torch.equal(model.logits(x[rows], residual[rows]), called[rows])
        assert torch.equal(sampled, called)
        return {"logits": called, "seen": seen}

    first, second = run_ranks(list(models), compute)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for row in range(2):
        assert first["seen"][row].nonzero()[:, 0].tolist() == sorted(set(TOKENS[row::2]))


SIZES: dict[str, Any] = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "bos_token_id": None,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def random_ranks(size: int, precision: str, head: str = "bf16", **sizes: Any) -> list[Decoder]:
    config = read_config({**SIZES, **sizes})

    def make(rank: Communicator) -> Decoder:
        device = torch.device("cpu")
        return random_decoder(
            config, precision, device, max_context=64, lm_head=head, communicator=rank
        )

    return run_ranks(local_communicators(size, timeout_s=TIMEOUT_S), make)


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16", "fp8-block"])
def test_a_ranks_layers_and_kernels_are_of_its_share(precision: str) -> None:
    head = "int8" if precision == "int8" else "bf16"
    for rank in random_ranks(2, precision, head):
        # What a model of half of the heads, intermediate sizes and vocabulary has.
        config = replace(read_config({**SIZES, "vocab_size": 32}).of_rank(2), num_heads=2)
        device = torch.device("cpu")
        half = random_decoder(config, precision, device, max_context=64, lm_head=head)
        found, expected = list(rank.linears()), list(half.linears())
        assert [(use.name, use.linear.shape) for use in found] == [
            (use.name, use.linear.shape) for use in expected
        ]
        assert [use.experts.shape for use in rank.experts()] == [(256, 256), (256, 128)]
        # Ranks that add up results before a norm take no MLP as one.
        alone = {kernel for kernel in half.kernels() if not getattr(kernel, "activation", "")}
        assert alone <= set(rank.kernels())
        assert rank.config.vocab_size == 64
        assert rank.embedding.shape == (32, 256)


@pytest.mark.parametrize("form", [None, "ct-int8-dynamic"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "phi3", "olmo2", "qwen2_moe"])
def test_kernels_named_ahead_are_those_of_ranks(
    name: str, form: str | None, tmp_path: Path
) -> None:
    hf = random_model(MODELS[name])
    if form is None:
        save_plain(tmp_path, hf, torch.bfloat16)
    else:
        write_quantized(tmp_path, hf, FORMATS[form])
    head = {None: None, "int8": torch.int8}
    for lm_head, dtype in head.items():
        ahead = _model_kernels(tmp_path, lm_head=lm_head, batch_invariant=True, ranks=2)
        loaded = load_ranks(tmp_path, 2, lm_head_dtype=dtype)
        assert ahead == {kernel for rank in loaded for kernel in rank.kernels()}


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp8-block"])
def test_random_ranks_route_and_choose_alike(precision: str) -> None:
    first, second = random_ranks(2, precision)
    routers = [model.layers[0].mixture.router.weight for model in (first, second)]
    assert torch.equal(*routers)
    assert not torch.equal(first.embedding, second.embedding)
    logits = rank_logits((first, second), TOKENS)
    assert torch.equal(*logits)
    assert 0.1 < logits[0].std() < 10


def test_random_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"gate_proj: got 250 rows for 4 ranks, expected"
    ):
        random_ranks(4, "bf16", moe_intermediate_size=250)


@pytest.mark.parametrize(
    ("communicator", "error", "match"),
    [
        (2, TypeError, "communicator: got 2, expected a Communicator or None"),
        (local_communicators(2)[1], ValueError, "communicator: got one of cpu, expected that of"),
    ],
)
def test_a_communicator_must_fit_the_model(
    communicator: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["llama"]))
    with pytest.raises(error, match=match):
        load_model(folder, device="meta", communicator=communicator)
