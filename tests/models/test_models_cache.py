"""The paged KV cache: what sequences hold, share, copy and give back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.models import DUMMY_PAGE, OutOfPagesError, PagedKVCache
from ostinato.models.kv_storage import KVStorage
from ostinato.ops.common.e4m3 import as_bytes

E4M3 = torch.float8_e4m3fn
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "fp8": {"dtype": E4M3, "scales": "token"},
    "fp8_static": {"dtype": E4M3, "scales": "static"},
    "int8": {"dtype": torch.int8, "scales": "token"},
    "int8_static": {"dtype": torch.int8, "scales": "static"},
}


def make_cache(
    num_pages: int = 9,
    page_size: int = 4,
    device: torch.device | str = "cpu",
    form: str = "fp32",
    **options: Any,
) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=2,
        device=device,
        **FORMATS[form],
        **options,
    )


def write(cache: PagedKVCache, sequence: int, start: int, values: list[float]) -> None:
    """Write numbers to the slots of tokens, as codes and as scales where there are some."""
    flat = as_bytes(cache.storage).flatten(2, 3)
    for slot, value in zip(cache.slots(sequence, start, start + len(values)), values, strict=True):
        flat[:, :, slot] = value if cache.storage.dtype is torch.float32 else int(value) % 100
        if cache.scales is not None:
            cache.scales.flatten(2, 3)[:, :, slot] = value


def read(cache: PagedKVCache, sequence: int) -> list[float]:
    """Return what was written; of codes without scales modulo 100."""
    flat = as_bytes(cache.storage).flatten(2, 3)
    slots = cache.slots(sequence, 0, cache.length(sequence))
    codes = [float(flat[1, 1, slot, 0, 0]) for slot in slots]
    if cache.scales is None:
        return codes
    scales = [float(cache.scales.flatten(2, 3)[1, 1, slot, 0]) for slot in slots]
    assert [scale % 100 for scale in scales] == codes
    return scales


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


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("length", [4, 6, 7, 8])
def test_fork_copies_the_shared_page_only_when_one_side_writes(
    length: int, form: str, device: torch.device
) -> None:
    cache = make_cache(device=device, form=form)
    cache.add(1)
    cache.reserve(1, length)
    write(cache, 1, 0, [float(i) for i in range(length)])
    cache.fork(1, 2)
    assert cache.pages(2) == cache.pages(1)
    used = cache.usable_pages - cache.free_pages
    cache.reserve(2, length + 1)
    assert cache.usable_pages - cache.free_pages == used + 1
    write(cache, 2, length, [50.0])
    cache.reserve(1, length + 1)
    write(cache, 1, length, [90.0])
    common = [float(i) for i in range(length)]
    assert read(cache, 1) == [*common, 90.0]
    assert read(cache, 2) == [*common, 50.0]
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


@pytest.mark.parametrize("form", FORMATS)
def test_prefix_is_found_in_whole_pages_while_held_and_after(form: str) -> None:
    cache = make_cache(form=form)
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


def paged_bits(cache: PagedKVCache, sequence: int) -> list[torch.Tensor]:
    tensors = [tensor for tensor in (cache.storage, cache.scales) if tensor is not None]
    pages = cache.pages(sequence)
    return [tensor.view(torch.uint8)[:, :, pages].clone() for tensor in tensors]


@pytest.mark.parametrize("form", FORMATS)
def test_swap_restores_the_same_bits(form: str, device: torch.device) -> None:
    cache = make_cache(device=device, form=form)
    cache.randomize()
    cache.add(1)
    cache.reserve(1, 7)
    before = paged_bits(cache, 1)
    assert all(bits.any() for bits in before)
    swapped = cache.swap_out(1)
    assert cache.free_pages == cache.usable_pages
    cache.add(2)
    cache.reserve(2, 9)
    for tensor in cache.tensors():
        tensor.view(torch.uint8).fill_(0x7F)  # NaN of fp32 and e4m3
    cache.swap_in(1, swapped)
    assert cache.length(1) == 7
    after = paged_bits(cache, 1)
    assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))


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


@pytest.mark.parametrize("form", FORMATS)
def test_all_memory_of_a_new_cache_is_zero_but_static_scales(
    form: str, device: torch.device
) -> None:
    cache = make_cache(device=device, form=form)
    pages, *scales = cache.tensors()
    assert not pages.view(torch.uint8).any()
    assert (cache.scales is None) == (form in ("fp32", "fp8_static"))
    if cache.scales is not None:
        assert cache.scales.shape == (2, 2, 9, 4, 1)
        assert not scales.pop(0).any()
    assert [scale.tolist() for scale in scales] == [[[1, 1], [1, 1]]] * ("static" in form)


@pytest.mark.parametrize("form", FORMATS)
def test_random_pages_are_normal_numbers_and_others_stay(form: str, device: torch.device) -> None:
    cache = make_cache(num_pages=200, device=device, form=form)
    cache.randomize(range(100, 200))
    numbers = cache.storage.float()
    for index in range(2):
        for number, scale in zip(numbers[index], cache.layer(index).stored_scales, strict=True):
            if scale is not None:
                number *= scale.unsqueeze(-1)
    assert not numbers[:, :, :100].any()
    wrong = 0.5 if form == "int8_static" else 0.1  # which has no scale of 1 to draw by
    assert abs(numbers[:, :, 100:].std() - 1) < wrong


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.int8}, "scales: got None, expected 'static' or 'token' for torch.int8"),
        ({"dtype": E4M3, "scales": "head"}, "scales: got 'head', expected 'static' or 'token'"),
        ({"dtype": torch.float32, "scales": "token"}, "scales: got 'token', expected None"),
        ({"dtype": torch.float64}, "dtype: got torch.float64, expected one of torch.bfloat16"),
        (
            {"dtype": E4M3, "scales": "static", "k_scale": torch.ones(2)},
            "v_scale: got None, expected both",
        ),
        (
            {"dtype": E4M3, "scales": "token", "k_scale": torch.ones(2), "v_scale": torch.ones(2)},
            "k_scale: got a tensor, expected None unless",
        ),
    ],
)
def test_formats_that_are_none_are_named(options: dict[str, Any], match: str) -> None:
    sizes = {"num_layers": 2, "num_pages": 4, "page_size": 4, "num_kv_heads": 3, "head_dim": 2}
    with pytest.raises(ValueError, match=match):
        PagedKVCache(**sizes, **options, device="cpu")


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (torch.ones(3), r"got shape \[3\], expected \[2\] or \[2, 3\]"),
        (torch.ones(2, 2), r"got shape \[2, 2\], expected"),
        (torch.tensor([1.0, 0.0]), r"got \[1.0, 0.0\], expected finite numbers above 0"),
        (torch.tensor([1.0, -1.0]), r"got .*, expected finite numbers above 0"),
        (torch.tensor([torch.nan, 1.0]), r"got .*, expected finite numbers above 0"),
        (torch.tensor([torch.inf, 1.0]), r"got .*, expected finite numbers above 0"),
    ],
    ids=str,
)
def test_static_scales_that_are_none_are_named(name: str, scale: torch.Tensor, match: str) -> None:
    sizes = {"num_layers": 2, "num_pages": 4, "page_size": 4, "num_kv_heads": 3, "head_dim": 2}
    given: dict[str, Any] = {"k_scale": torch.ones(2), "v_scale": torch.ones(2), name: scale}
    with pytest.raises(ValueError, match=f"{name}: {match}"):
        PagedKVCache(**sizes, dtype=torch.int8, scales="static", **given, device="cpu")


def test_layers_have_their_own_scales() -> None:
    k, v = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])
    sizes = {"num_layers": 2, "num_pages": 4, "page_size": 4, "num_kv_heads": 3, "head_dim": 2}
    scales = {"scales": "static", "k_scale": k, "v_scale": v}
    cache = PagedKVCache(**sizes, dtype=E4M3, **scales, device="cpu")  # type: ignore[arg-type]
    layer = cache.layer(1)
    assert layer.k_scale is not None
    assert layer.v_scale is not None
    assert (layer.k_scale.tolist(), layer.v_scale.tolist()) == ([2, 2, 2], [6, 7, 8])
    scales["v_scale"] = k * 3
    cache = PagedKVCache(**sizes, dtype=E4M3, **scales, device="cpu")  # type: ignore[arg-type]
    layer = cache.layer(1)
    assert layer.k_scale is not None
    assert layer.v_scale is not None
    assert (layer.k_scale.item(), layer.v_scale.item()) == (2, 6)


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

    def fail(*_: object) -> None:
        raise MemoryError

    copy = partial(cache.reserve, 1, 8)
    if operation == "swap_in":
        copy = partial(cache.swap_in, 3, swapped)
    with monkeypatch.context() as patch:
        patch.setattr(KVStorage, "copy_page", fail)
        patch.setattr(KVStorage, "write", fail)
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


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_only_a_cache_of_its_format_takes_a_sequence(form: str, other: str) -> None:
    cache, source = make_cache(form=form), make_cache(form=other)
    source.add(1)
    source.reserve(1, 3)
    swapped = source.swap_out(1)
    if form == other or {form, other} == {"int8", "int8_static"}:  # both with scales of tokens
        cache.swap_in(1, swapped)
        return
    with pytest.raises(ValueError, match=r"swapped: got .* scales, expected .* scales"):
        cache.swap_in(1, swapped)
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

    form = "fp32"

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(num_pages=8, page_size=3, form=self.form)
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


class ScaledCacheMachine(CacheMachine):
    """The same with scales beside the pages."""

    form = "int8"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30)
TestScaledCacheMachine = ScaledCacheMachine.TestCase
TestScaledCacheMachine.settings = settings(max_examples=30, stateful_step_count=30)
