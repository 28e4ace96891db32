"""The text tower in the config.json of a model of several towers, as transformers reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import MODELS

from ostinato.models import ModelConfig, UnsupportedModelError, read_config
from ostinato.models.registry import Tower, families, register

SIZES: dict[str, Any] = {
    "vocab_size": 200000,  # in which the tokens of all defaults are
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TOWERS = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "gemma3": "Gemma3",
    "mistral3": "Mistral3",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
}
FLAT = ("qwen2_vl", "qwen2_5_vl")
# Which the first versions of transformers left out of a `text_config`, being defaults.
OMITTED = {
    "llava": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    "llava_next": {"model_type": "mistral", "rope_theta": 1e6, "vocab_size": 32064},
    "llava_onevision": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "mistral3": {"model_type": "mistral", "head_dim": 128, "sliding_window": None},
    "qwen2_vl": {"vocab_size": 151936},
    "qwen2_5_vl": {"num_hidden_layers": 28, "rope_scaling": {"type": "mrope"}},
    "qwen3_vl": {"num_hidden_layers": 28},
    # Those of Gemma 3 4B.
    "gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def nested(tower: str, text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    kind = f"{TOWERS[tower]}ForConditionalGeneration"
    return {"model_type": tower, "architectures": [kind], "text_config": text, **outer}


def require_equal(ours: ModelConfig, theirs: Any) -> None:
    """Check what the shape of a decoder is made of against a text_config of transformers."""
    assert ours.text_tower
    assert ours.family == theirs.model_type
    for name in SIZES:
        mine = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
        mine["num_key_value_heads"] = "num_kv_heads"
        assert getattr(ours, mine.get(name, name)) == getattr(theirs, name), name
    heads = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or heads)
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.bos_token_id == getattr(theirs, "bos_token_id", None)
    window = getattr(theirs, "sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(theirs, "layer_types", None) or [kind] * theirs.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert ours.sliding_windows == tuple(windows)
    for rope, kind in zip(ours.ropes, kinds, strict=True):
        wanted = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert rope is not None
        assert (rope.theta, rope.type) == (wanted["rope_theta"], wanted["rope_type"])
        assert rope.factor == wanted.get("factor", 1.0)


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("text", ["whole", "defaults omitted", "by transformers"])
def test_text_configs_are_read_as_transformers_reads_them(tower: str, text: str) -> None:
    written = OMITTED[tower] if text == "defaults omitted" else SIZES
    config = nested(tower, dict(written), vision_config={"hidden_size": 7})
    theirs = getattr(transformers, f"{TOWERS[tower]}Config")(text_config=dict(written))
    if text == "by transformers":
        config = {**theirs.to_dict(), "architectures": config["architectures"]}
    ours = read_config(config)
    require_equal(ours, theirs.text_config)
    tied = written.get("tie_word_embeddings", tower == "gemma3")
    assert ours.tie_word_embeddings is tied or text[0] == "b"


@pytest.mark.parametrize("tower", FLAT)
def test_the_fields_of_qwens_files_are_beside_those_of_the_model(tower: str) -> None:
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    ids = {"bos_token_id": 5, "eos_token_id": 6}
    text = {**SIZES, **rope, **ids, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    config = {**nested(tower, {}), **text, "vision_config": {"hidden_size": 8}}
    del config["text_config"]
    flat = read_config(config)
    assert flat == read_config(nested(tower, text))
    assert (flat.dtype, flat.bos_token_id, flat.eos_token_ids) == (torch.bfloat16, 5, (6,))
    kept = {name: value for name, value in config.items() if name != "torch_dtype"}
    theirs = getattr(transformers, f"{TOWERS[tower]}Config")(**kept)
    require_equal(flat, theirs.text_config)
    assert theirs.tie_word_embeddings is flat.tie_word_embeddings is True


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("text", [None, "absent"])
def test_a_tower_without_its_text_config_is_refused(tower: str, text: str | None) -> None:
    config = nested(tower, {})
    config["text_config"] = None
    if text == "absent":
        del config["text_config"]
    match = r"^config\.json: text_config: got None, expected an object"
    with pytest.raises(UnsupportedModelError, match=match):
        read_config(config)
    with pytest.raises(UnsupportedModelError, match=r"text_config: got 'x', expected an object"):
        read_config({**config, "text_config": "x"})


def text_of(tower: str, **fields: Any) -> dict[str, Any]:
    return nested(tower, {**SIZES, **fields})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            text_of("qwen3_vl", model_type="qwen3_vl_moe_text"),
            "text_config: model_type: got 'qwen3_vl_moe_text', expected 'qwen3_vl_text'",
        ),
        (
            text_of("llava", model_type="opt"),
            "text_config: model_type: got 'opt', expected 'arcee'",
        ),
        (text_of("llava", model_type="llava"), "text_config: model_type: got 'llava', expected"),
        (text_of("llava", hidden_act="gelu"), "text_config: hidden_act: got 'gelu', expected"),
        (text_of("llava", hidden_size="x"), "text_config: hidden_size: got 'x', expected an int"),
        (
            text_of("llava", architectures=["LlamaModel"]),
            r"text_config: architectures: got \['LlamaModel'\], expected",
        ),
        (
            text_of("llava") | {"architectures": ["LlamaForCausalLM"]},
            r"config\.json: architectures: got \['LlamaForCausalLM'\], expected \['LlavaFor",
        ),
        (text_of("llava") | {"tie_word_embeddings": 1}, "tie_word_embeddings: got 1, expected tr"),
        (
            text_of("llava", rope_scaling={"type": "default", "mrope_section": [2, 3, 3]}),
            r"mrope_section: got \[2, 3, 3\], a field that is not supported",
        ),
        (text_of("llava", rope_scaling={"type": "mrope"}), "type: got 'mrope', expected 'default'"),
        *(
            (
                text_of(tower, rope_parameters={"surprise": 1}),
                "text_config: rope_parameters: surprise: got 1, a field that is not supported",
            )
            for tower in TOWERS
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_config(config)


def test_a_text_config_may_name_the_class_of_the_whole() -> None:
    for kind in ("LlamaForCausalLM", "LlavaForConditionalGeneration"):
        assert read_config(text_of("llava", architectures=[kind])).family == "llama"


@pytest.mark.parametrize(
    ("outer", "inner", "dtype"),
    [
        ({}, {}, torch.float32),
        ({}, {"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}, torch.bfloat16),
        ({"dtype": "bfloat16"}, {"torch_dtype": "float16"}, torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, {"dtype": "float16"}, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_models(
    outer: dict[str, str], inner: dict[str, str], dtype: torch.dtype
) -> None:
    assert read_config({**text_of("llava", **inner), **outer}).dtype is dtype


def test_end_tokens_are_the_towers_before_the_models() -> None:
    outer = {"eos_token_id": 9, "bos_token_id": 8}
    assert read_config({**text_of("qwen3_vl"), **outer}).eos_token_ids == (9,)
    config = read_config({**text_of("qwen3_vl", eos_token_id=[3, 4]), **outer})
    assert (config.bos_token_id, config.eos_token_ids) == (8, (3, 4))


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_either_field_ties_the_embeddings(outer: bool | None, inner: bool | None) -> None:
    config = text_of("mistral3", tie_word_embeddings=inner, model_type="mistral")
    tied = read_config({**config, "tie_word_embeddings": outer}).tie_word_embeddings
    assert tied is bool(outer or inner)


def test_a_model_type_is_registered_once() -> None:
    for name in ("llama", "llava"):
        with pytest.raises(ValueError, match=f"model_type: got '{name}', which is registered alr"):
            register(Tower(name, (), "llama"))
    with pytest.raises(ValueError, match="model_type: got 'qwen3_vl_text', which is registered"):
        register(families()["qwen3_vl_text"])


def test_a_text_tower_differs_in_the_names_of_tensors_alone() -> None:
    alone = read_config(MODELS["llama"].to_dict())
    tower = read_config(MODELS["llava"].to_dict())
    assert not alone.text_tower
    assert tower.text_tower
    assert {**vars(tower), "text_tower": False} == vars(alone)
