"""Halves of the L2: told apart by clocks, and pages of each sequence kept in one of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models import OutOfPagesError, PagedKVCache
from ostinato.models.l2.probe import BLOCK_BYTES, L2Map, find_partitions, parity
from ostinato.models.pages import DUMMY_PAGE, PagePool
from ostinato.ops import L2Partition

_BLOCKS = 512
_H200 = 0xAB000


def _clocks(
    mask: int, sm_halves: np.ndarray, *, near: float = 300, far: float = 500, noise: float = 25
) -> np.ndarray:
    """Return what each SM would take to each block, if block 0 is in partition 0."""
    random = np.random.default_rng(0)
    blocks = parity(np.arange(_BLOCKS) * BLOCK_BYTES & mask)
    own = sm_halves[:, None] == blocks
    of_sm = random.normal(0, 15, len(sm_halves))[:, None]
    clocks = np.where(own, near, far) + of_sm + random.normal(0, noise, own.shape)
    return clocks.astype(np.int64)


def _both(partitions: list[int]) -> bool:
    return len(set(partitions)) == 2


@given(
    mask=st.integers(1, _BLOCKS - 1).map(lambda bits: bits * BLOCK_BYTES),
    partitions=st.lists(st.integers(0, 1), min_size=4, max_size=40).filter(
        lambda h: len(set(h)) == 2
    ),
    data=st.data(),
)
def test_clocks_tell_which_half_an_sm_and_a_block_are_in(
    mask: int, partitions: list[int], data: st.DataObject
) -> None:
    sms = np.array(data.draw(st.permutations(range(len(partitions)))))
    found = find_partitions(_clocks(mask, np.array(partitions)), sms)
    assert found is not None
    assert found.mask == mask
    # Which partition is called 0 is free.
    by_sm = np.array(found.sms)[sms]
    assert (by_sm == np.array(partitions) ^ partitions[0]).all()
    again = found.partitions(_clocks(mask, np.array(partitions))[:, 1], sms)
    expected = int(parity(np.array([BLOCK_BYTES & mask]))[0]) ^ partitions[0]
    assert (again == expected).mean() > 0.9


@pytest.mark.parametrize(
    "clocks",
    [
        np.full((8, _BLOCKS), 300),
        _clocks(_H200, np.zeros(8, dtype=np.int64)),  # all SMs in one partition
        _clocks(0, np.arange(8) % 2),  # all blocks in one partition
        _clocks(_H200, np.arange(8) % 2, far=305),  # no further away than noise
        np.random.default_rng(1).integers(250, 550, (8, _BLOCKS)),
    ],
    ids=["equal", "one partition of SMs", "one partition of blocks", "too near", "noise"],
)
def test_what_is_not_two_halves_is_not_taken_for_them(clocks: np.ndarray) -> None:
    assert find_partitions(clocks, np.arange(8)) is None


def test_a_block_whose_half_no_parity_explains_is_not_accepted() -> None:
    clocks = _clocks(_H200, np.arange(8) % 2)
    clocks[:, [4, 5]] = clocks[:, [5, 4]]
    assert find_partitions(clocks, np.arange(8)) is None


def test_halves_by_clocks_of_the_sm_that_took_them() -> None:
    found = L2Map(_H200, sms=(0, 1), between=(400.0, 500.0))
    clocks, sms = np.array([390, 410, 450, 510]), np.array([0, 0, 1, 1])
    assert found.partitions(clocks, sms).tolist() == [0, 1, 1, 0]


@given(st.lists(st.integers(0, 2**62), min_size=1))
def test_parity(numbers: list[int]) -> None:
    assert parity(np.array(numbers)).tolist() == [n.bit_count() % 2 for n in numbers]


@given(
    partitions=st.lists(st.integers(0, 1), min_size=1, max_size=256),
    pages=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 2**32 - 1),
    page=st.integers(0, 2**31 - 1),
)
def test_words_are_as_the_kernel_takes_them(
    partitions: list[int], pages: int, heads: int, page: int
) -> None:
    made = L2Partition(partitions, pages, heads)
    assert made.words[8:] == [pages, heads]
    assert [made.words[sm // 32] >> sm % 32 & 1 for sm in range(len(partitions))] == partitions
    assert len(made.words) == 10
    assert made.partition_of_page(page) == (page & pages).bit_count() % 2


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (([0, 2], 1, 1), r"sms: got 2 of \[0, 2\], expected at most 256, each 0 or 1"),
        (([0] * 257, 1, 1), "sms: got 257"),
        (([0, 1], -1, 1), "pages: got -1, expected 0 to 4294967295"),
        (([0, 1], 1, 0), "heads: got 0, expected 1 to 4294967295"),
        (([0, 1], 1, 2**32), "heads: got 4294967296"),
    ],
)
def test_bad_halves(fields: tuple[list[int], int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        L2Partition(*fields)


def _partition(page: int) -> int:
    return (page & 0b10101).bit_count() % 2


@given(
    num_pages=st.integers(2, 60),
    counts=st.lists(st.integers(0, 12), max_size=12),
    returned=st.sets(st.integers(0, 11)),
)
def test_a_sequence_keeps_to_its_half_as_long_as_there_are_pages(
    num_pages: int, counts: list[int], returned: set[int]
) -> None:
    pool = PagePool(num_pages, _partition)
    free = set(range(num_pages)) - {DUMMY_PAGE}
    held: list[list[int]] = []
    for count in counts:
        by_half = [sum(_partition(page) == partition for page in free) for partition in (0, 1)]
        if count > len(free):
            with pytest.raises(OutOfPagesError):
                pool.take(count)
            continue
        pages = pool.take(min(count, 1))
        if pages:
            assert by_half[_partition(pages[0])] == max(by_half)
            pages += pool.take(count - 1, like=pages[0])
            mine = [page for page in pages if _partition(page) == _partition(pages[0])]
            assert len(mine) == min(count, by_half[_partition(pages[0])])
        assert len(set(pages)) == len(pages) == count
        assert set(pages) <= free
        free -= set(pages)
        held.append(pages)
        assert pool.available == len(free)
    for index in returned & set(range(len(held))):
        pool.release(held[index])
        free |= set(held[index])
    assert pool.available == len(free)
    assert set(pool.take(len(free))) == free


def test_each_sm_must_have_been_there_once() -> None:
    clocks = _clocks(_H200, np.arange(8) % 2)
    assert find_partitions(clocks, np.array([0, 1, 2, 3, 4, 5, 6, 6])) is None
    assert find_partitions(clocks, np.array([0, 1, 2, 3, 4, 5, 6, 8])) is None


def test_halves_are_integers_of_any_kind() -> None:
    made = L2Partition(np.array([0, 1, 1] * 20, dtype=np.int32), np.int64(5), np.uint8(3))
    assert made == L2Partition([0, 1, 1] * 20, 5, 3)
    assert made.words == L2Partition([0, 1, 1] * 20, 5, 3).words
    assert hash(made) == hash(L2Partition([0, 1, 1] * 20, 5, 3))
    with pytest.raises(TypeError):
        L2Partition([0, 1], 1.0, 1)  # type: ignore[arg-type]


def test_a_partition_gives_up_its_own_prefixes_first() -> None:
    pool = PagePool(33, _partition)
    pages = pool.take(32)
    pool.publish(pages, list(range(32 * 4)), 4)
    pool.release(pages)
    first = pool.take(1)
    taken = first + pool.take(7, like=first[0])
    assert {_partition(page) for page in taken} == {_partition(first[0])}
    # Least recently used first, of its partition: the ends of the prefix.
    own = [page for page in pages if _partition(page) == _partition(first[0])]
    assert taken == own[:-9:-1]
    kept = set(pool.match(list(range(32 * 4)), 4))
    assert not kept & set(taken)


@given(
    texts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30),
    held=st.integers(1, 3),
)
def test_pools_of_one_order_keep_the_same_prefixes(texts: list[tuple[int, int]], held: int) -> None:
    """Where pages lie is another matter on each rank's GPU; what is found must not be."""
    pools = [
        PagePool(20, partition_of, one_order=True)
        for partition_of in (_partition, lambda page: page >> 1 & 1, lambda page: 0)
    ]
    pools.append(PagePool(20))  # of a GPU whose partitions are not known
    sequences: list[list[list[int]]] = [[] for _ in pools]
    for kind, count in texts:
        tokens = [kind] * count
        found = set()
        for pool, own in zip(pools, sequences, strict=True):
            if len(own) == held:
                pool.release(own.pop(0))
            pages = pool.match(tokens, 1)
            found.add((len(pages), pool.available, pool.evictions))
            pool.share(pages)
            if count - len(pages) <= pool.available:
                pages = pages + pool.take(count - len(pages), like=pages[0] if pages else None)
                assert len(set(pages)) == count
                pool.publish(pages, tokens, 1)
            own.append(pages)
        assert len(found) == 1


def test_caches_on_the_cpu_can_be_copied() -> None:
    cache = PagedKVCache(
        num_layers=1,
        num_pages=4,
        page_size=2,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device="cpu",
    )
    again = pickle.loads(pickle.dumps(cache))
    assert again.l2_partition is None
    assert torch.equal(again.storage, cache.storage)
