"""The paged KV cache: what sequences hold, share, copy and give back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.models import DUMMY_PAGE, OutOfPagesError, PagedKVCache


def make_cache(
    num_pages: int = 9, page_size: int = 4, device: torch.device | str = "cpu"
) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=device,
    )


def write(cache: PagedKVCache, sequence: int, start: int, values: list[float]) -> None:
    flat = cache.storage.flatten(2, 3)
    for slot, value in zip(cache.slots(sequence, start, start + len(values)), values, strict=True):
        flat[:, :, slot] = value


def read(cache: PagedKVCache, sequence: int) -> list[float]:
    flat = cache.storage.flatten(2, 3)
    return [float(flat[1, 1, s, 0, 0]) for s in cache.slots(sequence, 0, cache.length(sequence))]


def test_reserve_gives_each_token_a_slot_of_its_own() -> None:
    cache = make_cache()
    for sequence, length in ((1, 5), (2, 4), (3, 1)):
        assert cache.add(sequence) == 0
        cache.reserve(sequence, length)
    slots = [slot for s in (1, 2, 3) for slot in cache.slots(s, 0, cache.length(s))]
    assert len(set(slots)) == 10
    assert min(slots) >= cache.page_size  # none in the dummy page
    assert cache.free_pages == cache.usable_pages - 4


def test_running_out_of_pages_changes_nothing() -> None:
    cache = make_cache(num_pages=4)
    cache.add(1)
    cache.reserve(1, 6)
    before = cache.pages(1)
    with pytest.raises(OutOfPagesError, match="2 pages needed, 1 of 3 free"):
        cache.reserve(1, 14)
    assert (cache.pages(1), cache.length(1), cache.free_pages) == (before, 6, 1)
    cache.reserve(1, 12)
    assert cache.free_pages == 0


@pytest.mark.parametrize("length", [4, 6, 7, 8])
def test_fork_copies_the_shared_page_only_when_one_side_writes(
    length: int, device: torch.device
) -> None:
    cache = make_cache(device=device)
    cache.add(1)
    cache.reserve(1, length)
    write(cache, 1, 0, [float(i) for i in range(length)])
    cache.fork(1, 2)
    assert cache.pages(2) == cache.pages(1)
    used = cache.usable_pages - cache.free_pages
    cache.reserve(2, length + 1)
    assert cache.usable_pages - cache.free_pages == used + 1
    write(cache, 2, length, [100.0])
    cache.reserve(1, length + 1)
    write(cache, 1, length, [200.0])
    common = [float(i) for i in range(length)]
    assert read(cache, 1) == [*common, 200.0]
    assert read(cache, 2) == [*common, 100.0]
    # The last owner of the page writes into it without another copy.
    assert cache.usable_pages - cache.free_pages == used + 1 + (length % 4 == 0)


def test_copy_on_write_without_a_free_page_is_refused() -> None:
    cache = make_cache(num_pages=3)
    cache.add(1)
    cache.reserve(1, 7)
    cache.fork(1, 2)
    before = cache.pages(2)
    with pytest.raises(OutOfPagesError):
        cache.reserve(2, 8)
    assert cache.pages(2) == before
    assert cache.length(2) == 7


def test_prefix_is_found_in_whole_pages_while_held_and_after() -> None:
    cache = make_cache()
    tokens = list(range(10))
    cache.add(1)
    cache.reserve(1, 10)
    write(cache, 1, 0, [float(t) for t in tokens])
    cache.publish(1, tokens)
    assert cache.add(2, tokens) == 8
    assert cache.pages(2) == cache.pages(1)[:2]
    cache.free(1)
    cache.free(2)
    assert cache.free_pages == cache.usable_pages
    assert cache.add(3, [*tokens[:8], 77, 78, 79, 80]) == 8
    assert read(cache, 3) == [float(t) for t in tokens[:8]]
    assert cache.add(4, [99, *tokens]) == 0


@pytest.mark.parametrize(("multiple", "shared"), [(1, 12), (4, 12), (8, 8), (16, 0)])
def test_shared_prefix_is_rounded_down(multiple: int, shared: int) -> None:
    cache = make_cache()
    tokens = list(range(14))
    cache.add(1)
    cache.reserve(1, 14)
    cache.publish(1, tokens)
    assert cache.add(2, tokens, multiple_of=multiple) == shared


def test_kept_pages_are_given_up_oldest_and_deepest_first() -> None:
    cache = make_cache(num_pages=5)
    for sequence, tokens in ((1, [1] * 8), (2, [2] * 8)):
        cache.add(sequence)
        cache.reserve(sequence, 8)
        cache.publish(sequence, tokens)
    cache.free(1)
    cache.free(2)
    cache.add(3)
    cache.reserve(3, 4)  # takes one page: the end of the older prefix
    assert cache.add(4, [1] * 8) == 4
    cache.free(4)
    assert cache.add(5, [2] * 8) == 8


def test_swap_restores_the_same_bits(device: torch.device) -> None:
    cache = make_cache(device=device)
    cache.storage.copy_(torch.randn(cache.storage.shape))
    cache.add(1)
    cache.reserve(1, 7)
    before = cache.storage[:, :, cache.pages(1)].clone()
    swapped = cache.swap_out(1)
    assert cache.free_pages == cache.usable_pages
    cache.add(2)
    cache.reserve(2, 9)
    cache.storage[:, :, cache.pages(2)] = float("nan")
    cache.swap_in(1, swapped)
    assert cache.length(1) == 7
    assert torch.equal(cache.storage[:, :, cache.pages(1)], before)


def test_page_table_is_padded_with_the_dummy_page() -> None:
    cache = make_cache()
    for sequence, length in ((1, 9), (2, 1)):
        cache.add(sequence)
        cache.reserve(sequence, length)
    table = cache.page_table([2, 1], 4)
    assert table.dtype == torch.int32
    assert table.tolist() == [
        [*cache.pages(2), *[DUMMY_PAGE] * 3],
        [*cache.pages(1), DUMMY_PAGE],
    ]
    with pytest.raises(ValueError, match="width: got 2, expected at least 3"):
        cache.page_table([1], 2)


@pytest.mark.parametrize("name", ["num_layers", "page_size", "num_kv_heads", "head_dim"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"num_layers": 1, "num_pages": 4, "page_size": 4, "num_kv_heads": 1, "head_dim": 2}
    with pytest.raises(ValueError, match=f"{name}: got 0, expected at least 1"):
        PagedKVCache(**{**sizes, name: 0}, dtype=torch.float32, device="cpu")


def test_a_cache_of_the_dummy_page_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages: got 1, expected at least 2"):
        make_cache(num_pages=1)


@pytest.mark.parametrize("operation", ["swap_in", "copy on write"])
def test_a_failing_copy_takes_no_pages(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    cache.add(1)
    cache.reserve(1, 7)
    cache.fork(1, 2)
    swapped = cache.swap_out(2)
    if operation == "copy on write":
        cache.swap_in(2, swapped)
        cache.free(2)
        cache.fork(1, 2)
    free, pages = cache.free_pages, cache.pages(1)

    class Broken:
        shape, dtype, device = cache.storage.shape, cache.storage.dtype, cache.storage.device

        def __getitem__(self, *_: object) -> None:
            raise MemoryError

        __setitem__ = __getitem__  # type: ignore[assignment]

    copy = partial(cache.reserve, 1, 8)
    if operation == "swap_in":
        copy = partial(cache.swap_in, 3, swapped)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "storage", Broken())
        with pytest.raises(MemoryError):
            copy()
    assert (cache.free_pages, cache.pages(1), cache.length(1)) == (free, pages, 7)


def test_a_sequence_of_another_kind_of_cache_is_not_swapped_in() -> None:
    cache, other = make_cache(), make_cache(page_size=2)
    other.add(1)
    other.reserve(1, 3)
    with pytest.raises(ValueError, match=r"swapped: got .*, expected \(2, 2, 2, 4, 1, 2\)"):
        cache.swap_in(1, other.swap_out(1))
    assert cache.free_pages == cache.usable_pages


def test_pages_to_add_is_what_adding_takes() -> None:
    cache = make_cache()
    tokens = list(range(12))
    cache.add(1)
    cache.reserve(1, 12)
    cache.publish(1, tokens)
    for held in (True, False):
        if not held:
            cache.free(1)
        expected = cache.pages_to_add(tokens, 14, multiple_of=8)
        free = cache.free_pages
        cache.add(2, tokens, multiple_of=8)
        cache.reserve(2, 14)
        assert free - cache.free_pages == expected == (2 if held else 4)
        cache.free(2)
    with pytest.raises(ValueError, match="multiple_of: got 0, expected at least 1"):
        cache.add(3, tokens, multiple_of=0)


def test_misuse_is_refused_by_name() -> None:
    cache = make_cache()
    cache.add(1)
    cache.reserve(1, 5)
    for misuse in (
        lambda: cache.add(1),
        lambda: cache.fork(1, 1),
        lambda: cache.swap_in(1, cache.swap_out(1)) or cache.add(1),
    ):
        with pytest.raises(ValueError, match="in use"):
            misuse()
    for misuse in (
        lambda: cache.free(9),
        lambda: cache.reserve(9, 1),
        lambda: cache.fork(9, 2),
        lambda: cache.slots(9, 0, 0),
        lambda: cache.swap_out(9),
        lambda: cache.page_table([9], 4),
    ):
        with pytest.raises(ValueError, match="id 9, which is not in the cache"):
            misuse()
    with pytest.raises(ValueError, match="length: got 4, expected at least 5"):
        cache.reserve(1, 4)
    with pytest.raises(ValueError, match="start, stop: got 3, 6, expected"):
        cache.slots(1, 3, 6)
    with pytest.raises(ValueError, match="tokens: got 6, expected at most 5"):
        cache.publish(1, [0] * 6)


class CacheMachine(RuleBasedStateMachine):
    """Random lives of sequences: each always reads back exactly what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(num_pages=8, page_size=3)
        self.written: dict[int, list[float]] = {}
        self.swapped: dict[int, object] = {}
        self.next_id = 0
        self.stamp = 0.0

    def _new(self) -> int:
        self.next_id += 1
        return self.next_id

    @rule()
    def add(self) -> None:
        sequence = self._new()
        self.cache.add(sequence)
        self.written[sequence] = []

    @precondition(lambda self: self.written)
    @rule(data=st.data(), count=st.integers(1, 7))
    def extend(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.written)))
        old = len(self.written[sequence])
        free, pages = self.cache.free_pages, self.cache.pages(sequence)
        try:
            self.cache.reserve(sequence, old + count)
        except OutOfPagesError:
            assert (self.cache.free_pages, self.cache.pages(sequence)) == (free, pages)
            return
        values = [self.stamp + i for i in range(count)]
        self.stamp += count
        write(self.cache, sequence, old, values)
        self.written[sequence] += values

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(sorted(self.written))), self._new()
        self.cache.fork(parent, child)
        self.written[child] = list(self.written[parent])

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.written)))
        self.cache.free(sequence)
        del self.written[sequence]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def publish_and_share(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.written)))
        tokens = [int(value) for value in self.written[sequence]]
        self.cache.publish(sequence, tokens)
        child = self._new()
        shared = self.cache.add(child, tokens)
        assert shared == len(tokens) // 3 * 3
        self.written[child] = self.written[sequence][:shared]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.written)))
        self.swapped[sequence] = (self.cache.swap_out(sequence), self.written.pop(sequence))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.swapped)))
        swapped, values = self.swapped[sequence]
        try:
            self.cache.swap_in(sequence, swapped)
        except OutOfPagesError:
            return
        del self.swapped[sequence]
        self.written[sequence] = values

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for sequence, values in self.written.items():
            assert read(self.cache, sequence) == values

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        held = {page for sequence in self.written for page in self.cache.pages(sequence)}
        assert DUMMY_PAGE not in held
        assert self.cache.free_pages + len(held) == self.cache.usable_pages


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30)
