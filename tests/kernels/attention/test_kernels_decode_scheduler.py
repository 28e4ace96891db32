"""Who works on what in decode attention: a function of the lengths, here computed on the host."""

from __future__ import annotations

import ctypes
import subprocess
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.jit.sources import CSRC

_CAPACITY = 1 << 16


class Split(NamedTuple):
    cta: int
    sequence: int
    head: int
    begin: int
    end: int
    whole: int


class FixedSplit(NamedTuple):
    cta: int
    sequence: int
    head: int
    begin: int
    end: int
    line_index: int
    whole: int
    ends: int
    first_cta: int
    ctas: int


Schedule = Callable[..., list[Split]]
FixedSchedule = Callable[[list[int], int, int, int], list[FixedSplit]]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("schedule") / "schedule.so"
    source = Path(__file__).with_name("decode_scheduler_shim.cpp")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True, timeout=120)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def schedule(shim: ctypes.CDLL) -> Schedule:
    """Give a function of tiles, KV heads, rows and grid that returns all splits, line by line."""

    def run(tiles: list[int], heads_kv: int, rows: int = 4, grid: int = 264) -> list[Split]:
        numbers = (ctypes.c_int * (6 * _CAPACITY))()
        given_tiles = (ctypes.c_int * len(tiles))(*tiles)
        count = shim.schedule(given_tiles, len(tiles), heads_kv, rows, grid, numbers, _CAPACITY)
        assert count >= 0
        return sorted(Split(*numbers[i * 6 : i * 6 + 6]) for i in range(count))

    return run


@pytest.fixture(scope="module")
def fixed_schedule(shim: ctypes.CDLL) -> FixedSchedule:
    """Give a function of tiles, KV heads, grid and split, in tiles, that returns all splits."""

    def run(tiles: list[int], heads_kv: int, grid: int, split: int) -> list[FixedSplit]:
        most = heads_kv * sum(-(-n // split) for n in tiles)
        numbers = (ctypes.c_int * (10 * most + 1))()
        given_tiles = (ctypes.c_int * len(tiles))(*tiles)
        count = shim.fixed_schedule(given_tiles, len(tiles), heads_kv, grid, split, numbers, most)
        assert count == most
        splits = [FixedSplit(*numbers[i * 10 : i * 10 + 10]) for i in range(count)]
        return sorted(splits, key=lambda part: part.line_index)

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


def test_lines_take_nearly_all_ctas(shim: ctypes.CDLL) -> None:
    for grid in (7, 132, 264):
        for heads_kv in range(1, 130):
            found = (ctypes.c_int * 2)()
            shim.lines(grid, 1, heads_kv, found)
            assert heads_kv > grid or tuple(found) == (1, grid)
            shim.lines(grid, grid + 1, heads_kv, found)
            lines, ctas = found
            assert heads_kv % lines == 0
            assert 0.96 * grid <= lines * ctas <= grid
    shim.lines(264, 34, 8, found)
    assert tuple(found) == (8, 33)


@settings(max_examples=200)
@given(load=loads())
def test_every_tile_belongs_to_one_split(
    schedule: Schedule, load: tuple[list[int], int, int, int]
) -> None:
    tiles, heads_kv, rows, grid = load
    work_tiles: dict[tuple[int, int], list[Split]] = defaultdict(list)
    parts: dict[tuple[int, bool], int] = defaultdict(int)
    for part in schedule(tiles, heads_kv, rows, grid):
        work_tiles[part.sequence, part.head].append(part)
        assert part.whole == (part.begin == 0 and part.end == tiles[part.sequence])
        if not part.whole:
            parts[part.cta, part.begin == 0] += 1
    live = {(b, h) for b, n in enumerate(tiles) if n for h in range(heads_kv)}
    assert set(work_tiles) == live
    for (sequence, _), splits in work_tiles.items():
        ends = [0, *(part.end for part in splits)]
        assert [part.begin for part in splits] == ends[:-1]
        assert ends[-1] == tiles[sequence]
        # CTAs side by side, so that the combine step knows where the partials are.
        first = splits[0].cta
        assert [part.cta for part in splits] == list(range(first, first + len(splits)))
    # The workspace has two places for each CTA: one of a work tile it begins, one of another.
    assert all(count == 1 for count in parts.values())
    # On one line, a launch has no more CTAs than the work tiles could have tiles.
    if live and len(tiles) * heads_kv <= grid:
        last = max(part.cta for splits in work_tiles.values() for part in splits)
        assert last < len(live) * max(tiles)


@settings(max_examples=200)
@given(load=loads(), split=st.sampled_from([1, 2, 5, 32, 1000]))
def test_fixed_splits_depend_on_their_sequence_alone(
    shim: ctypes.CDLL,
    fixed_schedule: FixedSchedule,
    load: tuple[list[int], int, int, int],
    split: int,
) -> None:
    tiles, heads_kv, _, grid = load
    splits = fixed_schedule(tiles, heads_kv, grid, split)
    # The splits do not depend on the grid; each has one position, in order within a work tile.
    wanted = [
        (b, h, begin, min(begin + split, n))
        for b, n in enumerate(tiles)
        for h in range(heads_kv)
        for begin in range(0, n, split)
    ]
    assert sorted((u.sequence, u.head, u.begin, u.end) for u in splits) == wanted
    assert [u.line_index for u in splits] == list(range(len(splits)))
    of_cta: dict[int, int] = defaultdict(int)
    work_tiles: dict[tuple[int, int], list[FixedSplit]] = defaultdict(list)
    for part in splits:
        of_cta[part.cta] += 1
        work_tiles[part.sequence, part.head].append(part)
    lines = (ctypes.c_int * 2)()
    shim.lines(grid, len(tiles), heads_kv, lines)
    assert max(of_cta.values(), default=0) <= -(-len(splits) // (lines[0] * lines[1]))
    if lines[0] == 1:  # those with work come first
        assert set(of_cta) == set(range(len(of_cta)))
    counters = []
    for (sequence, _), own in work_tiles.items():
        first = own[0].line_index
        assert [(u.begin, u.line_index) for u in own] == [
            (i * split, first + i) for i in range(len(own))
        ]
        ctas = sorted({u.cta for u in own})
        assert all(u.whole == (tiles[sequence] <= split) for u in own)
        # Each CTA of the work tile arrives once, after its last split of it.
        assert [u.cta for u in own if u.ends] == ctas
        assert all(not u.ends or u.cta != v.cta for u, v in pairwise(own))
        assert ctas == list(range(own[0].first_cta, own[0].first_cta + own[0].ctas))
        assert len({(u.first_cta, u.ctas) for u in own}) == 1
        if own[0].ctas > 1:
            counters.append(own[0].first_cta)
    # No two work tiles have the same counter.
    assert len(set(counters)) == len(counters)


@pytest.mark.parametrize(
    "tiles", [[512] + [4] * 31, [32] * 32, [8] * 32, [128], [512] * 8, [8] * 256], ids=str
)
def test_no_cta_has_much_more_than_its_share(schedule: Schedule, tiles: list[int]) -> None:
    fair = sum(tiles) * 8 / 264
    assert _busiest(schedule(tiles, heads_kv=8)) <= max(2.5 * fair, 8)


@settings(max_examples=200)
@given(
    batch=st.integers(9, 300),
    tiles=st.integers(16, 300),
    heads_kv=st.sampled_from([1, 4, 8]),
    grid=st.sampled_from([132, 264]),
)
def test_equal_lengths_keep_all_ctas_busy_in_any_batch(
    schedule: Schedule, batch: int, tiles: int, heads_kv: int, grid: int
) -> None:
    """At 36 sequences of 8 heads half of 264 CTAs could have two work tiles, others none."""
    splits = schedule([tiles] * batch, heads_kv, grid=grid)
    fair = tiles * batch * heads_kv / grid
    if batch * heads_kv >= grid // 2:
        # What sharing a work tile costs, and CTAs that are on no line.
        assert _busiest(splits) <= max(fair + 4, 1.13 * fair)


def _busiest(splits: list[Split]) -> int:
    of_cta: dict[int, int] = defaultdict(int)
    for part in splits:
        of_cta[part.cta] += part.end - part.begin
    return max(of_cta.values())


@pytest.mark.parametrize(
    ("tiles", "heads_kv", "rows", "parts"),
    [
        # Half of the places are enough for all parts that are worth it: more of them than ...
        ([8], 8, 8, 8),
        ([128], 1, 8, 32),
        ([32] * 8, 1, 8, 16),
        # ... where the other partition would be needed, too.
        ([128], 8, 4, 32),
        ([8] * 8, 8, 4, 1),
        ([32] * 32, 1, 8, 8),
    ],
    ids=str,
)
def test_splits_are_finer_where_half_of_the_ctas_are_free(
    schedule: Schedule, tiles: list[int], heads_kv: int, rows: int, parts: int
) -> None:
    splits: dict[tuple[int, int], int] = defaultdict(int)
    for part in schedule(tiles, heads_kv, rows):
        splits[part.sequence, part.head] += 1
    assert set(splits.values()) == {parts}
