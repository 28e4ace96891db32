"""Checkpoints of models with several towers, of which the text tower is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import (
    MODELS,
    TOKENS,
    config_of,
    hf_logits,
    random_model,
    save,
    save_plain,
    tensors_of,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from quantized_files import OTHER_TOWERS
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ostinato.checkpoint import (
    CheckpointError,
    UnsupportedCheckpointError,
    load_config,
    load_model,
    quantize_checkpoint,
)
from ostinato.checkpoint.text_tower import (
    family_name,
    modules_to_ignore,
    spellings,
    stored_name,
)
from ostinato.models import sequence_logits

TOWERS = [name for name, config in MODELS.items() if hasattr(config, "vision_config")]
NEW = {"model.language_model.": "model.language_model.", "lm_head.": "lm_head."}
OLD = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.visual.": "visual.",
}
PLAIN = {"model.language_model.": "model.", "model.visual.": "visual."}


def renamed(tensors: dict[str, Any], prefixes: dict[str, str]) -> dict[str, Any]:
    """Return tensors by other names: each begins with a prefix and goes on as before."""
    result = {}
    for name, tensor in tensors.items():
        found = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        result[prefixes.get(found, "") + name.removeprefix(found)] = tensor
    return result


def is_other(name: str) -> bool:
    return name.startswith(OTHER_TOWERS)


@pytest.fixture(scope="module")
def llava() -> PreTrainedModel:
    return random_model(MODELS["llava"])


layers = st.builds(
    "model.layers.{}.{}".format,
    st.integers(0, 200),
    st.sampled_from(["mlp.up_proj", "self_attn.q_proj", "input_layernorm"]),
)
others = st.from_regex(r"\A(model\.){0,3}[a-z_]{1,20}(\.[a-z0-9_]{1,9}){0,3}\.weight\Z")


@given(st.sampled_from(["model.embed_tokens", "model.norm", "lm_head"]) | layers)
def test_all_spellings_of_a_name_mean_it(name: str) -> None:
    spelt = spellings(name)
    assert spelt[0] == name
    assert {family_name(f"{other}.weight") for other in spelt} == {f"{name}.weight"}
    for other in spelt:
        assert stored_name(name, [f"{other}.weight"]) in spelt


@given(others)
def test_patterns_of_other_towers_match_them_and_no_text(name: str) -> None:
    assume(family_name(name) is None)
    patterns = [pattern.removeprefix("re:") for pattern in modules_to_ignore([name])]
    text = [*spellings("lm_head"), *spellings("model.layers.0.mlp.up_proj")]
    assert not any(re.match(pattern, module) for pattern in patterns for module in text)
    module = name.removesuffix(".weight")
    if module != "model" and not module.startswith("model.model."):
        assert any(re.match(pattern, module) for pattern in patterns)


def loads(folder: Path, model: PreTrainedModel) -> None:
    ours = sequence_logits(load_model(folder), TOKENS)
    assert (ours - hf_logits(model)).abs().max() <= 1e-4


@pytest.mark.parametrize("name", TOWERS)
def test_what_transformers_saves_is_loaded(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    model.save_pretrained(tmp_path)
    loads(tmp_path, model)


@pytest.mark.parametrize("prefixes", [NEW, OLD, PLAIN], ids=["new", "old", "plain"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_names_of_all_layouts_are_read(name: str, prefixes: dict[str, str], tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    loads(save(tmp_path, config_of(model), renamed(tensors_of(model), prefixes)), model)


@pytest.mark.parametrize("change", ["missing", "misnamed", "broken"])
def test_tensors_of_other_towers_do_not_count(
    change: str, llava: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = tensors_of(llava)
    for name in filter(is_other, list(tensors)):
        stored = tensors.pop(name)
        if change == "misnamed":
            tensors[name.replace("model.", "model.eye.")] = stored
        elif change == "broken":
            tensors[name] = torch.full((2,), torch.nan)
    loads(save(tmp_path, config_of(llava), tensors), llava)


def test_tensors_of_other_towers_are_copied_whatever_their_type(
    llava: PreTrainedModel, tmp_path: Path
) -> None:
    kinds = [torch.uint8, torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64]
    kinds += [torch.float8_e5m2, torch.complex64]
    extra = {f"model.vision_tower.extra.{n}": torch.ones(3).to(k) for n, k in enumerate(kinds)}
    source = save(tmp_path / "source", config_of(llava), {**tensors_of(llava), **extra})
    quantize_checkpoint(source, tmp_path / "target", scheme="int8", progress=False)
    written = load_file(tmp_path / "target" / "model.safetensors")
    for name, tensor in extra.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].view(torch.uint8).equal(tensor.view(torch.uint8))


@pytest.mark.parametrize("prefixes", [NEW, OLD, PLAIN], ids=["new", "old", "plain"])
@pytest.mark.parametrize("missing", ["model.language_model.layers.1.mlp.up_proj", "lm_head"])
def test_a_missing_tensor_of_the_text_tower_is_named(
    missing: str, prefixes: dict[str, str], llava: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = tensors_of(llava)
    del tensors[f"{missing}.weight"]
    save(tmp_path, config_of(llava), renamed(tensors, prefixes))
    (named,) = renamed({f"{missing}.weight": None}, prefixes)
    with pytest.raises(CheckpointError, match=f"model.safetensors: missing {re.escape(named)}$"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "surplus",
    [
        "model.language_model.layers.1.mlp.surprise",
        "model.language_model.layers.7.x",
        "language_model.surprise",
    ],
)
def test_a_surplus_tensor_of_the_text_tower_is_named(
    surplus: str, llava: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = tensors_of(llava) | {f"{surplus}.weight": torch.ones(1)}
    save(tmp_path, config_of(llava), renamed(tensors, OLD))
    (named,) = renamed({surplus: None}, OLD)
    with pytest.raises(CheckpointError, match=rf": {re.escape(named)}\.weight not part of the mod"):
        load_model(tmp_path)


def test_a_text_tower_by_another_name_is_missing(llava: PreTrainedModel, tmp_path: Path) -> None:
    tensors = renamed(tensors_of(llava), {"model.language_model.": "model.text_model."})
    save(tmp_path, config_of(llava), tensors)
    with pytest.raises(CheckpointError, match="holds 1 tensors of the text tower, too few"):
        load_model(tmp_path)


def test_a_tensor_in_two_layouts_is_refused(llava: PreTrainedModel, tmp_path: Path) -> None:
    tensors = tensors_of(llava)
    save(tmp_path, config_of(llava), tensors | {"model.norm.weight": torch.ones(32)})
    match = r"model\.language_model\.norm\.weight and model\.norm\.weight|model\.norm\.weight and "
    with pytest.raises(CheckpointError, match=match):
        load_model(tmp_path)


def test_a_text_config_that_is_missing_is_refused(llava: PreTrainedModel, tmp_path: Path) -> None:
    config = config_of(llava)
    del config["text_config"]
    save(tmp_path, config, tensors_of(llava))
    with pytest.raises(ValueError, match=r"config\.json: text_config: got None, expected an obj"):
        load_model(tmp_path)


def test_a_dtype_that_no_field_names_is_the_embeddings(
    llava: PreTrainedModel, tmp_path: Path
) -> None:
    config = {name: value for name, value in config_of(llava).items() if name != "dtype"}
    config["text_config"].pop("dtype", None)
    tensors = renamed(tensors_of(llava, torch.bfloat16), OLD)
    assert load_config(save(tmp_path, config, tensors)).dtype is torch.bfloat16


def quantized(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    """Quantise a folder; return its tensors."""
    quantize_checkpoint(source, target, scheme="int8", progress=False, **options)
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("prefixes", [NEW, OLD], ids=["new", "old"])
def test_the_quantiser_keeps_names_and_other_towers(
    prefixes: dict[str, str], llava: PreTrainedModel, tmp_path: Path
) -> None:
    plain = renamed(tensors_of(llava), prefixes)
    written = quantized(save(tmp_path / "plain", config_of(llava), plain), tmp_path / "int8")
    eight = {name for name, tensor in written.items() if tensor.dtype is torch.int8}
    assert written.keys() - plain.keys() == {f"{name}_scale" for name in eight}
    assert plain.keys() <= written.keys()
    (text,) = renamed({"model.language_model.": None}, prefixes)
    assert len(eight) == 14
    assert all(name.startswith(text) for name in eight)
    for name in plain.keys() - eight:
        assert torch.equal(plain[name], written[name])


def test_transformers_reads_the_quantised_folder(llava: PreTrainedModel, tmp_path: Path) -> None:
    """Its other towers are left in peace, and the text tower is in 8 bits."""
    llava.save_pretrained(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "int8")
    theirs = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "int8", dtype=torch.float32, attn_implementation="eager"
    )
    plain = llava.state_dict()
    others = [name for name in plain if is_other(name)]
    for name in others:
        assert torch.equal(theirs.state_dict()[name], plain[name]), name
    quantization_error = (hf_logits(theirs) - hf_logits(llava)).abs().max()
    assert 0.01 < quantization_error < 1.0
    assert (hf_logits(theirs) - sequence_logits(load_model(tmp_path / "int8"), TOKENS)).std() < 0.1


@pytest.mark.parametrize("prefixes", [NEW, OLD, PLAIN], ids=["new", "old", "plain"])
@pytest.mark.parametrize(
    "ignored",
    [
        ["lm_head"],
        ["language_model.lm_head"],
        ["re:.*lm_head", "re:.*vision_tower.*", "model.multi_modal_projector.linear_1"],
    ],
    ids=str,
)
def test_ignored_modules_have_the_names_of_any_layout(
    ignored: list[str], prefixes: dict[str, str], llava: PreTrainedModel, tmp_path: Path
) -> None:
    plain = save(tmp_path / "plain", config_of(llava), renamed(tensors_of(llava), prefixes))
    quantized(plain, tmp_path / "int8")
    file = tmp_path / "int8" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ignore"] = ignored
    logits = sequence_logits(load_model(tmp_path / "int8"), TOKENS)
    file.write_text(json.dumps(config))
    assert torch.equal(logits, sequence_logits(load_model(tmp_path / "int8"), TOKENS))


@pytest.mark.parametrize(
    ("targets", "fits"),
    [
        (["re:.*language_model.*_proj"], True),
        (["re:model.language_model.layers.*_proj"], True),
        (["re:language_model.model.layers.*_proj"], True),
        (["re:.*text_model.*"], False),
    ],
)
def test_targets_have_the_names_of_any_layout(
    targets: list[str], fits: bool, llava: PreTrainedModel, tmp_path: Path
) -> None:
    quantized(save_plain(tmp_path / "plain", llava), tmp_path / "int8")
    file = tmp_path / "int8" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    file.write_text(json.dumps(config))
    if fits:
        load_model(tmp_path / "int8")
    else:
        with pytest.raises(CheckpointError, match="got dtype I8, expected BF16 or"):
            load_model(tmp_path / "int8")


def test_the_quantiser_ignores_modules_by_any_name(llava: PreTrainedModel, tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", llava)
    for index, name in enumerate(("model.layers.0.mlp.down_proj", "language_model.model.layers.1")):
        ignore = ["lm_head", f"re:{re.escape(name)}.*"]
        tensors = quantized(plain, tmp_path / str(index), ignore=ignore)
        key = name.replace("language_model.model.", "model.").replace(
            "model.layers", "model.language_model.layers"
        )
        kept = [name for name in tensors if name.startswith(key)]
        assert kept
        assert all(tensors[name].dtype is torch.float32 for name in kept)
        load_model(tmp_path / str(index))
    with pytest.raises(ValueError, match=r"ignore: got 'model\.visual', which matches no linear"):
        quantized(plain, tmp_path / "none", ignore=["lm_head", "model.visual"])


def test_a_quantised_text_tower_is_no_plain_source(llava: PreTrainedModel, tmp_path: Path) -> None:
    quantized(save_plain(tmp_path / "plain", llava), tmp_path / "int8")
    with pytest.raises(UnsupportedCheckpointError, match="quantised already"):
        quantized(tmp_path / "int8", tmp_path / "again")
