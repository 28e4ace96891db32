"""What a rank keeps of each part: the ranks' results make up the whole's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import MODELS, SHAPE, random_model, save_plain
from quantized_files import FORMATS, write_quantized
from transformers import LlamaConfig

from ostinato.checkpoint import load_config
from ostinato.checkpoint.load import CheckpointLoader
from ostinato.checkpoint.quantization import load_quantization
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.checkpoint.storage.base import Target
from ostinato.models import UnsupportedModelError, family_of, read_config
from ostinato.models.layout import DecoderLayout
from ostinato.models.parts import LinearPart

# Whose vocabulary four ranks can divide, with biases everywhere.
CONFIG = LlamaConfig(**{**SHAPE, "vocab_size": 60}, attention_bias=True, mlp_bias=True)
STORED = ("plain", "ct-int8-dynamic", "ct-int8-static", "ct-fp8-dynamic", "hf-fp8-static")
COLUMN_TOLERANCE = {"plain": 1e-5}  # else each rank quantises its own columns


@pytest.fixture(params=STORED)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Give a tiny model with biases in one format: its name and folder."""
    model = random_model(CONFIG)
    if request.param == "plain":
        save_plain(tmp_path / "model", model)
    else:
        write_quantized(tmp_path / "model", model, FORMATS[request.param])
    return request.param, tmp_path / "model"


def layouts(folder: Path, size: int) -> list[DecoderLayout]:
    """Return the layout of the whole model, then those of all ranks."""
    config = load_config(folder)
    whole = family_of(config).layout(config)
    return [whole, *(whole.shard(rank, size) for rank in range(size))]


def loader(reader: CheckpointReader, folder: Path) -> CheckpointLoader:
    target = Target(torch.device("cpu"), torch.float32, batch_invariant=True)
    return CheckpointLoader(reader, load_quantization(folder).scheme_of, target, None)


def heads_in_order(parts: list[torch.Tensor], part: LinearPart) -> torch.Tensor:
    """Return ranks' outputs, each [its q; its k; its v], as the whole's [q; k; v]."""
    split = [y.split([m.num_rows for m in part.modules], dim=1) for y in parts]
    return torch.cat([torch.cat(module, dim=1) for module in zip(*split, strict=True)], dim=1)


@pytest.mark.parametrize("name", ["qkv", "gate_up"])
def test_outputs_of_ranks_stand_side_by_side(stored: tuple[str, Path], name: str) -> None:
    _, folder = stored
    whole, *ranks = layouts(folder, 2)
    with CheckpointReader(folder) as reader:
        load = loader(reader, folder)
        parts = [getattr(layout.layers[0], name) for layout in (whole, *ranks)]
        layers = [part.build(load) for part in parts]
    x = torch.randn(5, parts[0].shape[1])
    expected, *found = (layer(x) for layer in layers)
    assert torch.equal(heads_in_order(found, parts[1]), expected)


@pytest.mark.parametrize("name", ["o", "down"])
def test_outputs_of_ranks_add_up(stored: tuple[str, Path], name: str) -> None:
    form, folder = stored
    whole, *ranks = layouts(folder, 2)
    with CheckpointReader(folder) as reader:
        load = loader(reader, folder)
        parts = [getattr(layout.layers[0], name) for layout in (whole, *ranks)]
        layers = [part.build(load) for part in parts]
    x = torch.randn(5, parts[0].shape[1])
    expected = layers[0](x)
    columns = [part.modules[0].kept_columns for part in parts[1:]]
    total = sum(layer(x[:, kept]) for layer, kept in zip(layers[1:], columns, strict=True))
    tolerance = COLUMN_TOLERANCE.get(form, 0.05) * float(expected.abs().max())
    assert torch.allclose(total, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("vocab_size", [60, 61])
def test_tables_of_the_vocabulary_stand_one_under_another(vocab_size: int, tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(LlamaConfig(**{**SHAPE, "vocab_size": vocab_size})))
    whole, *ranks = layouts(tmp_path, 4)
    with CheckpointReader(tmp_path) as reader:
        load = loader(reader, tmp_path)
        table, *found = (layout.embedding.build(load) for layout in (whole, *ranks))
        head, *heads = (load.head(layout.lm_head, table) for layout in (whole, *ranks))
        norms = [layout.norm.build(load).weight for layout in (whole, *ranks)]
    assert torch.equal(torch.cat(found), table)
    x = torch.randn(3, CONFIG.hidden_size)
    assert torch.equal(torch.cat([part(x) for part in heads], dim=1), head(x))
    assert all(torch.equal(norm, norms[0]) for norm in norms)


@pytest.mark.parametrize(
    ("name", "part", "rows"),
    [
        # Of q 32 rows, of k and v 16 each; of gate and up 48 each.
        ("phi3", "qkv", [slice(16, 32), slice(40, 48), slice(56, 64)]),
        ("phi3", "gate_up", [slice(24, 48), slice(72, 96)]),
        ("glm4", "gate_up", [slice(24, 48), slice(72, 96)]),
    ],
)
def test_ranks_divide_every_section_of_a_matrix(name: str, part: str, rows: list[slice]) -> None:
    config = read_config(MODELS[name].to_dict())
    layer = family_of(config).layout(config).shard(1, 2).layers[0]
    assert [module.kept_rows for module in getattr(layer, part).modules] == rows


def test_ranks_beyond_the_kv_heads_keep_the_same_ones(tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(CONFIG))
    _, *ranks = layouts(tmp_path, 4)
    q, k, _ = zip(*(layout.layers[0].qkv.modules for layout in ranks), strict=True)
    dim = CONFIG.hidden_size // CONFIG.num_attention_heads
    assert [module.kept_rows for module in q] == [slice(i * dim, i * dim + dim) for i in range(4)]
    assert [module.kept_rows for module in k] == [slice(0, dim)] * 2 + [slice(dim, 2 * dim)] * 2


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({}, 3, r"q_proj: got 4 groups of 8 rows for 3 ranks, expected a multiple of 3$"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            6,
            r"k_proj: got 4 groups of 8 rows for 6 ranks, expected a multiple of 6 or a divisor of "
            r"it$",
        ),
        (
            {"intermediate_size": 50},
            4,
            r"gate_proj: got 50 rows for 4 ranks, expected a multiple of 4",
        ),
        (
            {"vocab_size": 5},
            4,
            r"embed_tokens\.weight: got 5 rows for 4 ranks, expected some for the last rank where "
            r"the others have 2 each",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: dict[str, int], size: int, message: str, tmp_path: Path
) -> None:
    save_plain(tmp_path, random_model(LlamaConfig(**{**SHAPE, **sizes})))
    with pytest.raises(UnsupportedModelError, match=message):
        layouts(tmp_path, size)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_that_do_not_exist_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(CONFIG))
    (whole, *_) = layouts(tmp_path, 1)
    with pytest.raises(ValueError, match=f"rank: got {rank} of {size}"):
        whole.shard(rank, size)
