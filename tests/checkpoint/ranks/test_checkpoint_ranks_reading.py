"""A rank reads its share of a checkpoint's files, and nothing else of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, random_model, save_plain
from rank_models import load_ranks
from safetensors.torch import load_file, save_file

from ostinato.checkpoint import CheckpointError, load_config, load_model
from ostinato.checkpoint.storage.base import Kept
from ostinato.models import family_of
from ostinato.models.layout import DecoderLayout
from ostinato.models.parts import LinearPart, NormPart, TensorPart
from ostinato.ops.collective.communicator import local_communicators


def of_rank(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a plain checkpoint with NaN wherever a rank has no share."""
    config = load_config(folder)
    layout: DecoderLayout = family_of(config).layout(config).shard(rank, size)
    tensors = load_file(folder / "model.safetensors")
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}

    def keep(name: str, rows: slice | None, columns: slice | None = None) -> None:
        kept = (rows or slice(None), *(() if columns is None else (columns,)))
        found[name][kept] = tensors[name][kept]

    for part in layout.parts():
        if isinstance(part, TensorPart):
            keep(part.spec.name, part.kept_rows)
        elif isinstance(part, NormPart):
            keep(part.weight.name, part.kept_rows)
        elif isinstance(part, LinearPart):
            for module in part.modules:
                keep(f"{module.name}.weight", module.kept_rows, module.kept_columns)
                if module.bias is not None and module.keeps_bias:
                    keep(module.bias.name, module.kept_rows)
    return found


@pytest.mark.parametrize("name", ["llama-biases", "phi3", "glm4"])
def test_a_rank_reads_nothing_beside_its_share(name: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS[name]))
    file, communicators = folder / "model.safetensors", local_communicators(4)
    whole = load_ranks(folder, 4)
    written = load_file(file)
    for expected, rank in zip(whole, communicators, strict=True):
        share = of_rank(folder, rank.rank, 4)
        save_file(share, file)
        found = load_model(folder, communicator=rank)
        pairs = zip(expected.tensors(), found.tensors(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        with pytest.raises(CheckpointError, match="holds NaN or an infinity"):
            load_model(folder, communicator=communicators[rank.rank - 1])
        save_file(written, file)


def test_ranks_read_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["llama-biases"]))
    counted: list[int] = []
    read = Kept.read

    def counting(self: Kept, reader: Any) -> torch.Tensor:
        found = read(self, reader)
        counted.append(found.nbytes)
        return found

    monkeypatch.setattr(Kept, "read", counting)
    totals = []
    for rank in local_communicators(2):
        counted.clear()
        load_model(folder, communicator=rank)
        totals.append(sum(counted))
    tensors = load_file(folder / "model.safetensors")
    norms = sum(x.nbytes for name, x in tensors.items() if "norm" in name)
    every = sum(x.nbytes for x in tensors.values())
    assert sum(totals) == every + norms  # which both of them keep
    assert max(totals) < 0.55 * every


def test_a_copy_of_a_tied_embedding_is_compared_by_who_has_its_rows(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["llama-tied"]))
    tensors = load_file(folder / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    copy[-1] += 1
    save_file({**tensors, "lm_head.weight": copy}, folder / "model.safetensors")
    first, second = local_communicators(2)
    assert load_model(folder, communicator=first).lm_head is not None
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from"):
        load_model(folder, communicator=second)


def test_ranks_are_told_from_those_of_other_checkpoints(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["llama-biases"]))
    file, (first, second) = folder / "model.safetensors", local_communicators(2)
    one = load_model(folder, communicator=first).fingerprint
    assert one == load_model(folder, communicator=second).fingerprint
    assert load_model(folder).fingerprint is None
    others = [
        load_model(folder, communicator=first, dtype=torch.float16).fingerprint,
        load_model(folder, communicator=first, lm_head_dtype=torch.int8).fingerprint,
    ]
    written = load_file(file)
    for name, tensor in written.items():
        save_file({**written, name: tensor * 2 + 1}, file)
        others.append(load_model(folder, communicator=first).fingerprint)
    assert len({one, *others}) == 1 + len(others)
