"""Who works on what in decode attention: a function of the lengths, here computed on the host."""

from __future__ import annotations

import ctypes
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kernels.sources import CSRC

_CAPACITY = 1 << 16


class Piece(NamedTuple):
    cta: int
    sequence: int
    head: int
    begin: int
    end: int
    whole: int


Schedule = Callable[..., list[Piece]]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    """Give a function of tiles, KV heads, rows, grid and max_splits that returns all pieces."""
    library = tmp_path_factory.mktemp("schedule") / "schedule.so"
    source = Path(__file__).with_name("decode_schedule_shim.cpp")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True, timeout=120)
    compute = ctypes.CDLL(str(library)).schedule

    def run(
        tiles: list[int], heads_kv: int, rows: int = 4, grid: int = 264, max_splits: int = 0
    ) -> list[Piece]:
        numbers = (ctypes.c_int * (6 * _CAPACITY))()
        given_tiles = (ctypes.c_int * len(tiles))(*tiles)
        count = compute(
            given_tiles, len(tiles), heads_kv, rows, grid, max_splits, numbers, _CAPACITY
        )
        assert count >= 0
        return [Piece(*numbers[i * 6 : i * 6 + 6]) for i in range(count)]

    return run


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    longest = draw(st.sampled_from([1, 8, 32, 128, 600]))
    lengths = st.one_of(st.just(longest), st.integers(0, longest), st.sampled_from([0, 1, longest]))
    tiles = draw(st.lists(lengths, min_size=1, max_size=draw(st.sampled_from([1, 8, 40, 300]))))
    heads_kv = draw(st.sampled_from([1, 2, 3, 8, 32]))
    return (
        tiles,
        heads_kv,
        draw(st.sampled_from([1, 4, 8, 64])),
        draw(st.sampled_from([7, 132, 264])),
    )


@settings(max_examples=200, deadline=None)
@given(load=loads(), max_splits=st.sampled_from([0, 0, 1, 3, 16]))
def test_every_tile_is_somebodys_once(
    schedule: Schedule, load: tuple[list[int], int, int, int], max_splits: int
) -> None:
    tiles, heads_kv, rows, grid = load
    segments: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    parts: dict[tuple[int, bool], int] = defaultdict(int)
    for piece in schedule(tiles, heads_kv, rows, grid, max_splits):
        segments[piece.sequence, piece.head].append(piece)
        assert piece.whole == (piece.begin == 0 and piece.end == tiles[piece.sequence])
        if not piece.whole:
            parts[piece.cta, piece.begin == 0] += 1
    live = {(b, h) for b, n in enumerate(tiles) if n for h in range(heads_kv)}
    assert set(segments) == live
    for (sequence, _), pieces in segments.items():
        ends = [0, *(piece.end for piece in pieces)]
        assert [piece.begin for piece in pieces] == ends[:-1]
        assert ends[-1] == tiles[sequence]
        # CTAs side by side, so that whoever merges knows where the parts are.
        first = pieces[0].cta
        assert [piece.cta for piece in pieces] == list(range(first, first + len(pieces)))
    # The workspace has two places for each CTA: one of a segment it begins, one of another.
    assert all(count == 1 for count in parts.values())


@settings(max_examples=100, deadline=None)
@given(load=loads())
def test_one_split_leaves_every_segment_whole(
    schedule: Schedule, load: tuple[list[int], int, int, int]
) -> None:
    tiles, heads_kv, rows, grid = load
    assert all(p.whole for p in schedule(tiles, heads_kv, rows, grid, max_splits=1))


@pytest.mark.parametrize(
    "tiles", [[512] + [4] * 31, [32] * 32, [8] * 32, [128], [512] * 8, [8] * 256], ids=str
)
def test_no_cta_has_much_more_than_its_share(schedule: Schedule, tiles: list[int]) -> None:
    of_cta: dict[int, int] = defaultdict(int)
    for piece in schedule(tiles, heads_kv=8):
        of_cta[piece.cta] += piece.end - piece.begin
    fair = sum(tiles) * 8 / 264
    assert max(of_cta.values()) <= max(2.5 * fair, 8)
