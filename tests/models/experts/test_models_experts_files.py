"""How checkpoints store experts, and what is refused of them by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from block_files import hf
from experts_files import (
    EXPERTS,
    QWEN,
    QWEN_BLOCKS,
    edit_config,
    rewrite,
    stack_experts,
    tensors_in,
)
from hf_models import MODELS, TOKENS, random_model, save_plain
from quantized_files import compressed_tensors

from ostinato.checkpoint import CheckpointError, load_config, load_model, quantize_checkpoint
from ostinato.checkpoint.load import CheckpointLoader
from ostinato.checkpoint.quantization import load_quantization
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.checkpoint.storage.base import Target
from ostinato.models import UnsupportedModelError, family_of, read_config, sequence_logits
from ostinato.models.experts.products import BlockFP8Experts, DenseExperts, W8A8Experts
from ostinato.models.layout import DecoderLayout


def logits_of(folder: Path) -> torch.Tensor:
    return sequence_logits(load_model(folder), TOKENS)


def plain_or_quantized(folder: Path, scheme: str | None) -> Path:
    """Write a model whose experts are stored one by one."""
    config = QWEN_BLOCKS if scheme == "fp8-block" else QWEN
    plain = save_plain(folder / "plain", random_model(config))
    if scheme is None:
        return plain
    quantize_checkpoint(plain, folder / scheme, scheme=scheme, progress=False)
    return folder / scheme


KINDS = {
    None: DenseExperts,
    "int8": W8A8Experts,
    "fp8": W8A8Experts,
    "fp8-block": BlockFP8Experts,
}


@pytest.mark.parametrize("scheme", KINDS)
def test_experts_stored_together_are_the_same(scheme: str | None, tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, scheme)
    one_by_one = logits_of(folder)
    stack_experts(folder, 4)
    assert f"{EXPERTS}.gate_up_proj" in tensors_in(folder)
    model = load_model(folder)
    assert torch.equal(sequence_logits(model, TOKENS), one_by_one)
    assert {type(use.experts) for use in model.experts()} == {KINDS[scheme]}


def test_blocks_of_experts_together_as_transformers_spells_them(tmp_path: Path) -> None:
    """Its configuration does not list routers, which are no linear modules there."""
    folder = plain_or_quantized(tmp_path, "fp8-block")
    expected = logits_of(folder)
    stack_experts(folder, 4)
    renamed = {
        name.replace("_scale", "_scale_inv"): tensor for name, tensor in tensors_in(folder).items()
    }
    rewrite(folder, renamed)
    edit_config(folder, quantization_config=hf(modules_to_not_convert=["lm_head"]))
    assert f"{EXPERTS}.down_proj_scale_inv" in renamed
    assert torch.equal(logits_of(folder), expected)


@pytest.mark.parametrize("together", [False, True])
def test_the_largest_static_scale_serves_all_experts(together: bool, tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, "fp8")
    tensors = tensors_in(folder)
    for name in list(tensors):
        if name.endswith("weight_scale"):
            scale = 0.02 if ".2." in name else 0.01
            tensors[name.replace("weight_scale", "input_scale")] = torch.tensor([scale])
    rewrite(folder, tensors)
    if together:
        stack_experts(folder, 4)
        stacked = tensors_in(folder)
        of_one = re.compile(rf"{EXPERTS}\.\d+\.\w+\.input_scale")
        stacked = {name: t for name, t in stacked.items() if not of_one.fullmatch(name)}
        for name in ("gate_up_proj", "down_proj"):
            stacked[f"{EXPERTS}.{name}_input_scale"] = torch.tensor([0.01, 0.01, 0.02, 0.01])
        rewrite(folder, stacked)
    section = compressed_tensors("float", "channel", "tensor")
    edit_config(folder, quantization_config=section)
    model = load_model(folder)
    assert [float(use.experts.input_scale) for use in model.experts()] == [pytest.approx(0.02)] * 2
    assert sequence_logits(model, TOKENS).isfinite().all()


def test_experts_together_may_be_stored_by_columns(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE's files have them: [experts, columns, rows]."""
    folder = save_plain(tmp_path / "plain", random_model(MODELS["qwen3_vl_moe"]))
    tensors, hidden = tensors_in(folder), 32
    together = [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]
    expected, logits = [], []
    for by_columns in (False, True):
        for name in together:
            rows = 48 if "gate_up" in name else hidden
            if (tensors[name].shape[1] == rows) == by_columns:
                tensors[name] = tensors[name].mT.contiguous()
        rewrite(folder, tensors)
        logits.append(logits_of(folder))
        out = tmp_path / f"int8-{by_columns}"
        quantize_checkpoint(folder, out, scheme="int8", progress=False)
        expected.append(logits_of(out))
    assert len(together) == 4
    assert torch.equal(*logits)
    assert torch.equal(*expected)


def test_a_quantiser_keeps_experts_together(tmp_path: Path) -> None:
    plain = plain_or_quantized(tmp_path, None)
    stack_experts(plain, 4)
    quantize_checkpoint(plain, tmp_path / "together", scheme="int8", progress=False)
    tensors = tensors_in(tmp_path / "together")
    assert tensors[f"{EXPERTS}.gate_up_proj"].dtype is torch.int8
    assert tensors[f"{EXPERTS}.gate_up_proj_scale"].shape == (4, 48, 1)
    assert tensors[f"{EXPERTS}.down_proj_scale"].shape == (4, 32, 1)
    assert tensors["model.layers.0.mlp.gate.weight"].dtype is torch.float32
    stored = load_quantization(tmp_path / "together").scheme_of
    assert str(stored("model.layers.0.mlp.gate")) == "not quantised"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("scheme", KINDS)
def test_ranks_divide_every_expert(scheme: str | None, together: bool, tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, scheme)
    if together:
        stack_experts(folder, 4)
    config, scheme_of = load_config(folder), load_quantization(folder).scheme_of
    with CheckpointReader(folder) as reader:
        target = Target(torch.device("cpu"), torch.float32, batch_invariant=True)
        loader = CheckpointLoader(reader, scheme_of, target, None)
        whole = family_of(config).layout(config).found_in(reader.has)
        parts = [layout.layers[0].mixture for layout in (whole, *_ranks(whole))]
        gate_up, *ranks = (part.gate_up.build(loader) for part in parts)
        if scheme == "fp8-block":  # whose columns are one block
            with pytest.raises(ValueError, match="got columns 0 to 64 for a rank"):
                parts[1].down.build(loader)
        else:
            down = [part.down.build(loader).weight for part in parts]
            assert torch.equal(torch.cat([w.float() for w in down[1:]], 2), down[0].float())
    half = config.experts.intermediate_size // 2
    gates = torch.cat([rank.weight.float()[:, :half] for rank in ranks], 1)
    ups = torch.cat([rank.weight.float()[:, half:] for rank in ranks], 1)
    assert torch.equal(torch.cat([gates, ups], 1), gate_up.weight.float())
    if scheme in ("int8", "fp8"):
        scales = [rank.weight_scale.view(4, 2, half) for rank in ranks]
        assert torch.equal(torch.cat(scales, 2).view(4, -1), gate_up.weight_scale)


def _ranks(layout: DecoderLayout) -> list[DecoderLayout]:
    return [layout.shard(rank, 2) for rank in range(2)]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, None)
    tensors = tensors_in(folder)
    del tensors[f"{EXPERTS}.2.up_proj.weight"]
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=rf"missing {EXPERTS}\.2\.up_proj\.weight$"):
        load_model(folder)


def test_a_missing_part_of_experts_together_is_named(tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, "int8")
    stack_experts(folder, 4)
    tensors = tensors_in(folder)
    del tensors[f"{EXPERTS}.down_proj_scale"]
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=rf"missing {EXPERTS}\.down_proj\.weight_scale"):
        load_model(folder)


def test_too_few_experts_together_are_refused_by_shape(tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, None)
    stack_experts(folder, 4)
    tensors = tensors_in(folder)
    name = f"{EXPERTS}.gate_up_proj"
    rewrite(folder, {**tensors, name: tensors[name][:3].contiguous()})
    with pytest.raises(CheckpointError, match=r"got shape \[3, 48, 32\], expected \[4, 48, 32\]"):
        load_model(folder)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, None)
    tensors, router = tensors_in(folder), "model.layers.0.mlp.gate.weight"
    rewrite(folder, {**tensors, router: tensors[router][:3].contiguous()})
    edit_config(folder, num_experts=3, num_local_experts=None)
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}\.3\.down_proj\.weight.* not part of"):
        load_model(folder)


@pytest.mark.parametrize("ignored", [f"{EXPERTS}.1.up_proj", "re:.*experts\\.3\\..*"])
def test_experts_in_mixed_schemes_are_named(ignored: str, tmp_path: Path) -> None:
    folder = plain_or_quantized(tmp_path, "int8")
    section = compressed_tensors("int", "channel", "token", ignore=["lm_head", ignored])
    edit_config(folder, quantization_config=section)
    which = r"1\.up_proj" if "1.up" in ignored else r"3\.gate_proj"
    with pytest.raises(
        UnsupportedModelError,
        match=rf"{EXPERTS}\.{which}: got not quantised, expected the scheme of "
        rf"{EXPERTS}\.0\.gate_proj, INT8 with a scale per row, activations with a scale per token",
    ):
        load_model(folder)


def test_zero_points_of_experts_are_refused(tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", random_model(QWEN))
    quantize_checkpoint(plain, tmp_path / "out", scheme="int8-asymmetric", progress=False)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: got activations with zero points"):
        load_model(tmp_path / "out")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """GLM-4.5's files have one behind the last layer, which a quantiser copies."""
    plain = save_plain(tmp_path / "plain", random_model(MODELS["glm4_moe"]))
    expected = logits_of(plain)
    tensors = tensors_in(plain)
    extra = {"model.layers.2.eh_proj.weight": torch.randn(32, 64)}
    rewrite(plain, tensors | extra)
    assert torch.equal(logits_of(plain), expected)
    quantize_checkpoint(plain, tmp_path / "int8", scheme="int8", progress=False)
    copied = tensors_in(tmp_path / "int8")["model.layers.2.eh_proj.weight"]
    assert torch.equal(copied, extra["model.layers.2.eh_proj.weight"])
    load_model(tmp_path / "int8")
    stored = load_quantization(tmp_path / "int8").scheme_of
    assert str(stored("model.layers.2.eh_proj")) == "not quantised"
    assert str(stored("model.layers.1.self_attn.q_proj")) != "not quantised"


@pytest.mark.parametrize(
    ("name", "fields", "match"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: got 9, expected an integ"),
        (
            "qwen3_moe",
            {"num_experts": 1025},
            "num_experts: got 1025, expected an integer from 1 to",
        ),
        (
            "qwen3_moe",
            {"num_experts": 64, "num_experts_per_tok": 33},
            "num_experts_per_tok: got 33, expected an integer from 1 to 32",
        ),
        ("qwen3_moe", {"num_experts": 0, "num_local_experts": None}, "num_experts: got 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: got 1, expected true or false"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size: got None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0, expected an int"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, r"mlp_only_layers: got \[-1\], expected integers"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok: got 7, expected an integer"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu' or 'swish'"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: g"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: got 8.0, expected None"),
        ("granitemoe", {"residual_multiplier": 0}, "residual_multiplier: got 0, expected a finite"),
        ("glm4_moe", {"n_group": 3, "topk_group": 1}, "num_groups: got 3, expected a divisor of"),
        ("glm4_moe", {"n_group": 8, "topk_group": 8}, "num_groups: got 8 of 1 expert each, expe"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group: got 3, expected an integer"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, "top_k: got 3, expected 1 to 2, the experts"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method: got 'greedy', expected 'noaux_tc'"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts: got 0, expected an integer"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func: got 'softmax', expected 'sigm"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list: got \[1, 0\], expected 1 al"),
        ("minimax_m2", {"rotary_dim": 3, "rope_parameters": None}, "partial_rotary_factor: got 0."),
        ("dots1", {"layer_types": ["full_attention"]}, "layer_types: got .* 2 times"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias: got True, expected False"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k: got 9, expected an integer from 1 to 8"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min: got 0.1, expected a finite numb"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index: got -2, expected an"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 3]}, r"moe_topk: got \[2, 3\], expected an integer fr"),
        (
            "hunyuan_v1_moe",
            {"num_experts": [6, 0]},
            r"num_experts: got \[6, 0\], expected integers",
        ),
        (
            "hunyuan_v1_moe",
            {"moe_intermediate_size": 48},
            "moe_intermediate_size: got 48, expected",
        ),
        (
            "hunyuan_v1_moe",
            {"num_shared_expert": [2, 2]},
            r"num_shared_expert: got \[2, 2\], expec",
        ),
        (
            "hunyuan_v1_moe",
            {"use_mixed_mlp_moe": False},
            "use_mixed_mlp_moe: got False, expected T",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(name: str, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_config({**MODELS[name].to_dict(), **fields})


def test_the_rotated_share_of_older_files_of_minimax() -> None:
    written = {**MODELS["minimax_m2"].to_dict(), "rotary_dim": 4, "rope_parameters": None}
    (rope,) = read_config(written).rotations
    assert rope.partial_rotary_factor == 0.25
