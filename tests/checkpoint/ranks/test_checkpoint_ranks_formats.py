"""Ranks read their shares of checkpoints in every format, and compute what one device computes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import block_files
import pytest
import torch
from hf_models import IDS, MODELS, SHAPE, TOKENS, hf_logits, random_model, save_plain
from quantized_files import FORMATS, SPELLINGS, sturdy_tokens, write_quantized
from rank_models import load_ranks, logits_of_ranks
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Phi3Config, Qwen3MoeConfig

from effort import effort
from ostinato.checkpoint import (
    UnsupportedCheckpointError,
    load_model,
    quantize_checkpoint,
)
from ostinato.checkpoint.storage.base import Kept
from ostinato.models import KVScales, sequence_logits
from ostinato.ops.collective.communicator import local_communicators

STORED = {**FORMATS, **SPELLINGS}
# With fixed scales of activations each rank's codes are those of one device.
FIXED = [name for name, form in STORED.items() if not form.inputs.endswith("token")]
TOLERANCE = 1e-4
# Two and four ranks divide it where blocks end.
BLOCKS = LlamaConfig(
    **{
        **SHAPE,
        "num_hidden_layers": 1,  # of more hardly any token is sturdy
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    attention_bias=True,
)
EXPERTS = Qwen3MoeConfig(
    **{**SHAPE, "num_hidden_layers": 1},
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    norm_topk_prob=True,
)


def check_logits(
    folder: Path, plain: Any, size: int, *, sturdy: list[int] | None = None, **options: Any
) -> None:
    """Compare ranks with one device, within the error of quantisation itself.

    With tokens of `sturdy_tokens` codes are equal, and only fp32 additions differ.
    """
    tokens = sturdy or TOKENS
    expected = sequence_logits(load_model(folder, **options), tokens)
    found = logits_of_ranks(folder, size, tokens, **options)
    error = float((expected.cpu() - hf_logits(plain, tokens)).abs().max())
    assert error > 0.01, "nothing was quantised"
    # Where a scale of a whole token is found at run time, each rank finds that of its own columns.
    assert (found - expected).abs().max() <= (TOLERANCE if sturdy else 2 * error)


@pytest.mark.parametrize("size", effort([2], [2, 4]))
@pytest.mark.parametrize("form", STORED)
def test_quantized_ranks_compute_the_logits_of_one(
    form: str, size: int, device: torch.device, tmp_path: Path
) -> None:
    plain = random_model(MODELS["llama-biases"])
    written = write_quantized(tmp_path, plain, STORED[form])
    # As in test_checkpoint_logits.py: tensor cores add FP8 with about 13 bits of fraction.
    exact = form in FIXED and (device.type == "cpu" or STORED[form].dtype is torch.int8)
    sturdy = sturdy_tokens(written.twin(), 4) if exact else None
    check_logits(tmp_path, plain, size, sturdy=sturdy, device=device)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *product(("phi3", "glm4"), ("ct-int8-static", "ct-fp8-static")),
        *product(("olmo2", "cohere-qk-norm", "gemma2"), ("ct-fp8-static",)),
    ],
)
def test_quantized_ranks_of_other_families(name: str, form: str, tmp_path: Path) -> None:
    plain = random_model(MODELS[name])
    written = write_quantized(tmp_path, plain, FORMATS[form])
    check_logits(tmp_path, plain, 2, sturdy=sturdy_tokens(written.twin(), 2))


@pytest.mark.parametrize("size", effort([2], [2, 4]))
@pytest.mark.parametrize("form", effort(["hf", "modelopt"], list(block_files.FORMATS)))
def test_ranks_keep_blocks(form: str, size: int, device: torch.device, tmp_path: Path) -> None:
    plain = random_model(BLOCKS)
    written = block_files.write_blocks(tmp_path, plain, block_files.FORMATS[form])
    sturdy = sturdy_tokens(written.twin(), 1) if device.type == "cpu" else None
    check_logits(tmp_path, plain, size, sturdy=sturdy, device=device)


def test_ranks_keep_blocks_of_sections(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
    sizes["num_hidden_layers"] = 1
    plain = random_model(Phi3Config(**{**SHAPE, **IDS, **sizes}))
    written = block_files.write_blocks(tmp_path, plain, block_files.FORMATS["hf-minimax"])
    check_logits(tmp_path, plain, 2, sturdy=sturdy_tokens(written.twin(), 1))


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({}, r"layers\.0\.self_attn\.o_proj: got columns 0 to 64 for a rank, expected multip"),
        (
            {"head_dim": 128, "intermediate_size": 1536},
            r"layers\.0\.mlp\.down_proj: got columns 0 to 192 for a rank, expected multiples of",
        ),
        (
            {"head_dim": 128, "intermediate_size": 1568},
            r"mlp\.gate_proj, model\.layers\.0\.mlp\.up_proj: blocks: got channels 0 to 196 of a "
            r"weight, expected multiples of 8",
        ),
    ],
)
def test_ranks_that_cut_blocks_are_refused_by_name(
    sizes: dict[str, int], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_model(LlamaConfig(**{**BLOCKS.to_dict(), **sizes}))
    block_files.write_blocks(tmp_path, plain, block_files.FORMATS["hf-minimax"])
    monkeypatch.delattr(Kept, "read")  # nothing is read
    with pytest.raises(UnsupportedCheckpointError, match=match):
        load_model(tmp_path, communicator=local_communicators(8)[0])


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8-block"])
def test_ranks_divide_quantized_experts(scheme: str, tmp_path: Path) -> None:
    plain = random_model(EXPERTS)
    source = save_plain(tmp_path / "plain", plain)
    folder = tmp_path / "quantized"
    ignored = ("lm_head", "re:.*self_attn.*") if scheme == "fp8-block" else ("lm_head",)
    quantize_checkpoint(source, folder, scheme=scheme, ignore=ignored, progress=False)
    check_logits(folder, plain, 2)


def test_ranks_quantize_their_rows_of_the_head(tmp_path: Path) -> None:
    plain = random_model(MODELS["llama-tied"])
    folder = save_plain(tmp_path, plain)
    check_logits(folder, plain, 2, lm_head_dtype=torch.int8)
    whole = load_model(folder, lm_head_dtype=torch.int8).lm_head
    heads = [rank.lm_head.linear for rank in load_ranks(folder, 2, lm_head_dtype=torch.int8)]
    assert torch.equal(torch.cat([head.weight for head in heads]), whole.weight)
    assert torch.equal(torch.cat([head.weight_scale for head in heads]), whole.weight_scale)


def test_ranks_have_the_scales_of_their_kv_heads(tmp_path: Path) -> None:
    layers = torch.arange(1.0, 4.0)
    of_layers = KVScales(torch.int8, layers, layers)
    assert of_layers.shard(1, 2) is of_layers
    heads = torch.arange(1.0, 13.0).view(3, 4)
    of_heads = KVScales(torch.float8_e4m3fn, heads, heads + 0.5)
    for rank in range(8):
        found = of_heads.shard(rank, 8)
        assert torch.equal(found.k, heads[:, rank // 2 : rank // 2 + 1])
        assert torch.equal(found.v, found.k + 0.5)
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head"}
    plain = random_model(MODELS["llama"])
    form = FORMATS["ct-int8-static"]
    form = type(form)(
        *(form.dtype, form.per_channel, form.inputs),
        {**form.config, "kv_cache_scheme": {**scheme, "dynamic": False}},
    )
    write_quantized(tmp_path, plain, form)
    file = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([0.04, 0.06]) * (1 + layer)
        for layer in range(2)
        for part in "kv"
    }
    save_file({**load_file(file), **scales}, file)
    ranks = load_ranks(tmp_path, 2)
    assert [rank.kv_scales.k[:, 0].tolist() for rank in ranks] == [
        pytest.approx([0.04, 0.08]),
        pytest.approx([0.06, 0.12]),
    ]
    # A key or value at a border of the cache's codes changes logits by less than quantising does.
    check_logits(tmp_path, plain, 2)
