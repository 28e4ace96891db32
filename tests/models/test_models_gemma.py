"""Gemma's own: its factor of embeddings, its norms, capped logits, and the fields of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import MODELS, TOKENS, hf_logits, random_model, save_plain
from quantized_files import FORMATS, write_quantized

from ostinato import ops
from ostinato.checkpoint import load_model
from ostinato.engine import Engine, SamplingParams
from ostinato.models import AttentionInputs, PagedKVCache, read_config, sequence_logits
from ostinato.models.layers import Sampling
from tiny import byte_tokenizer

GEMMAS = [name for name in MODELS if name.startswith("gemma")]
# What text_config of a 27B says; the sizes of the vision tower do not count.
GEMMA_3_27B: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "model_type": "gemma3_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_factor_of_embeddings_is_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    hf = random_model(MODELS["gemma"]).to(dtype)
    model = load_model(save_plain(tmp_path, hf, dtype))
    wanted = hf.model.embed_tokens(torch.arange(61))
    assert torch.equal(model.embedding, wanted)
    exact = hf.model.embed_tokens.weight * 32**0.5
    assert torch.equal(exact, wanted) == (dtype is torch.float32)


def test_norms_are_kept_in_fp32(tmp_path: Path) -> None:
    """Since 1 + w has more bits than w."""
    hf = random_model(MODELS["gemma3_text"]).bfloat16()
    model = load_model(save_plain(tmp_path, hf, torch.bfloat16))
    layer, theirs = model.layers[1], hf.model.layers[1]
    pairs = (
        (layer.input_norm, theirs.input_layernorm),
        (layer.attention_output_norm, theirs.post_attention_layernorm),
        (layer.post_attention_norm, theirs.pre_feedforward_layernorm),
        (layer.mlp_output_norm, theirs.post_feedforward_layernorm),
        (layer.q_norm, theirs.self_attn.q_norm),
        (layer.k_norm, theirs.self_attn.k_norm),
        (model.norm, hf.model.norm),
    )
    for norm, module in pairs:
        assert torch.equal(norm.weight, 1.0 + module.weight.float())
        assert norm.eps == module.eps


@pytest.mark.parametrize("name", GEMMAS)
def test_errors_in_bf16_are_within_twice_transformers(name: str, tmp_path: Path) -> None:
    hf = random_model(MODELS[name])
    exact = hf_logits(hf)
    theirs = hf_logits(hf.bfloat16())
    ours = sequence_logits(load_model(save_plain(tmp_path, hf, torch.bfloat16)), TOKENS)
    rounded = hf_logits(hf.float())  # the weights of the file
    assert (ours - rounded).abs().max() <= 2 * (theirs - rounded).abs().max()
    assert (rounded - exact).abs().max() > 0


def decode_inputs(model: Any, batch: int) -> tuple[Any, ...]:
    """Return the inputs of a step of several sequences of one token each."""
    cache = PagedKVCache.for_model(
        model.config, num_pages=batch + 1, page_size=4, device=torch.device("cpu")
    )
    for row in range(batch):
        cache.add(row)
        cache.reserve(row, 1)
    rows = range(batch)
    attention = AttentionInputs(
        slot_mapping=torch.tensor([slot for row in rows for slot in cache.slots(row, 0, 1)]),
        page_table=cache.page_table(list(rows), 1),
        seq_lens=torch.ones(batch, dtype=torch.int32),
    )
    tokens, positions = torch.tensor(TOKENS[:batch]), torch.zeros(batch, dtype=torch.int32)
    return tokens, positions, attention, cache


@pytest.mark.parametrize("form", [None, "ct-int8-dynamic", "ct-int8-with-lm-head"])
def test_sampled_rows_are_capped_and_greedy_ones_keep_their_best(
    form: str | None, tmp_path: Path
) -> None:
    hf = random_model(MODELS["gemma2"] if form != "ct-int8-with-lm-head" else UNTIED)
    if form is None:
        save_plain(tmp_path, hf)
    else:
        write_quantized(tmp_path, hf, FORMATS[form])
    model = load_model(tmp_path)
    cap = model.config.logits_softcap
    inputs = decode_inputs(model, 4)
    capped = model(*inputs)
    assert capped.abs().max() <= cap
    sampling = Sampling(torch.tensor([0.0, 0.8, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.3, 1.0]))
    logits = model.logits_to_sample(*inputs, sampling).values
    assert torch.equal(logits[[1, 2]], capped[[1, 2]])
    assert (logits[[0, 3]].abs().amax(1) > cap).all()
    assert torch.equal(logits[[0, 3]].argmax(1), capped[[0, 3]].argmax(1))
    torch.testing.assert_close(cap * (logits[[0, 3]] / cap).tanh(), capped[[0, 3]])


UNTIED = transformers.Gemma2Config(
    **{**MODELS["gemma2"].to_dict(), "tie_word_embeddings": False, "final_logit_softcapping": 1.5}
)


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_temperatures_divide_capped_logits(temperature: float, tmp_path: Path) -> None:
    """The first token is sampled after the prompt, the others by the captured step."""
    hf = random_model(MODELS["gemma2"])
    engine = Engine(load_model(save_plain(tmp_path, hf)), byte_tokenizer(), max_batch=8)
    engine.capture(progress=False)
    prompt, seeds = TOKENS[:5], range(8)
    params = [
        SamplingParams(max_tokens=6, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in seeds
    ]
    texts = [list(c.token_ids) for c in engine.generate([prompt] * len(seeds), params)]
    engine.close()
    for seed, text in zip(seeds, texts, strict=True):
        logits = hf_logits(hf, [*prompt, *text])[len(prompt) - 1 : -1]
        assert logits.abs().max() <= 2.0
        count = len(text)
        chosen = ops.sample(
            logits,
            temperature=torch.full((count,), temperature),
            top_k=torch.zeros(count, dtype=torch.int32),
            top_p=torch.ones(count),
            min_p=torch.zeros(count),
            seeds=torch.full((count,), seed),
            counters=torch.arange(count),
        )
        assert text == chosen.tolist()
    assert len({tuple(text) for text in texts}) > 1


@pytest.mark.parametrize("spelling", ["first", "transformers 5"])
def test_the_files_of_gemma_3_are_read(spelling: str) -> None:
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    theirs = transformers.Gemma3Config(text_config=dict(GEMMA_3_27B))
    text = GEMMA_3_27B if spelling == "first" else theirs.text_config.to_dict()
    ours = read_config({**outer, "text_config": text, "vision_config": {"hidden_size": 1152}})
    kinds = theirs.text_config.layer_types
    assert kinds.count("full_attention") == 10
    for kind, window, rope in zip(kinds, ours.sliding_windows, ours.ropes, strict=True):
        assert rope is not None
        full = kind == "full_attention"
        assert window == (None if full else 1024)
        assert (rope.theta, rope.factor) == ((1e6, 8.0) if full else (1e4, 1.0))
    assert ours.attention_scale == 168**-0.5
    assert ours.embedding_scale == 5376**0.5
    assert (ours.vocab_size, ours.max_position_embeddings) == (262208, 131072)
    assert ours.tie_word_embeddings
    assert ours.dtype is torch.bfloat16
    assert ours.eos_token_ids == (1,) if spelling == "transformers 5" else (1, 106)
    assert ours.attention_softcap == ours.logits_softcap == 0.0


def test_bases_of_both_kinds_of_layers_may_be_written() -> None:
    text = {**GEMMA_3_27B, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    config = {**text, "sliding_window_pattern": 2, "architectures": ["Gemma3ForCausalLM"]}
    sizes = {"vocab_size": 300, "max_position_embeddings": 512}
    ours = read_config({**config, **sizes})
    theirs = transformers.Gemma3TextConfig(**text, **sizes, sliding_window_pattern=2)
    parameters = theirs.rope_parameters
    for kind, rope in zip(theirs.layer_types, ours.ropes, strict=True):
        assert rope is not None
        assert rope.theta == parameters[kind]["rope_theta"]
    assert {rope.theta for rope in ours.ropes if rope} == {5e5, 2e4}
    assert theirs.layer_types[:2] == ["sliding_attention", "full_attention"]


def test_a_cap_that_is_null_is_none_and_an_absent_one_is_gemma_2s() -> None:
    config = MODELS["gemma2"].to_dict()
    absent = {name: value for name, value in config.items() if "softcapping" not in name}
    assert read_config(absent).attention_softcap == 50.0
    assert read_config(absent).logits_softcap == 30.0
    null = {**absent, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert read_config(null).attention_softcap == read_config(null).logits_softcap == 0.0


def test_capped_models_name_the_kernel_that_caps(tmp_path: Path) -> None:
    for name, capped in (("gemma2", True), ("gemma2-uncapped", False), ("gemma3_text", True)):
        model = load_model(save_plain(tmp_path / name, random_model(MODELS[name])))
        assert any(v.name == "softcap-fp32" for v in model.kernels()) == capped


def test_greedy_tokens_are_those_of_capped_logits() -> None:
    logits = 60 * torch.randn(50, 400)
    assert torch.equal(ops.softcap(logits.clone(), 30.0).argmax(1), logits.argmax(1))
