"""Halves of a GPU's L2: a cache's pages are where it says, and results do not depend on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ostinato import ops
from ostinato.bench.engine import number_tokenizer
from ostinato.bench.shapes import SHAPES
from ostinato.bench.weights import random_decoder
from ostinato.engine import Engine, SamplingParams
from ostinato.graphs.inspect.driver import GraphDriver
from ostinato.models import PagedKVCache, read_config
from ostinato.models.l2 import partitioned_memory
from ostinato.models.l2.probe import l2_map, probe

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
_SHAPE = {"num_layers": 3, "page_size": 16, "num_kv_heads": 8, "head_dim": 128}
_PAGES = 1100


def _cache(**other: int | bool | str | torch.dtype) -> PagedKVCache:
    given = {**_SHAPE, "num_pages": _PAGES, "dtype": torch.bfloat16, **other}
    return PagedKVCache(device=CUDA, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache() -> PagedKVCache:
    made = _cache()
    if made.l2_partition is None:
        pytest.skip("this GPU's L2 partitions are not told apart")
    return made


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"num_kv_heads": 4, "num_pages": 2100},
        {"head_dim": 64, "num_pages": 2100},
        {"dtype": torch.float8_e4m3fn, "scales": "static", "num_pages": 2100},
        {"dtype": torch.int8, "scales": "token", "num_pages": 1100, "page_size": 32},
    ],
    ids=str,
)
def test_keys_and_values_are_in_the_half_that_the_cache_says(
    cache: PagedKVCache, other: dict[str, int | str | torch.dtype]
) -> None:
    made = _cache(**other)
    assert made.l2_partition is not None
    l2 = l2_map(0)
    assert l2 is not None
    random = np.random.default_rng(3)
    layers, kinds, pages, size, heads, dim = made.storage.shape
    picks = [random.integers(n, size=4000) for n in (layers, kinds, pages, size, heads, dim)]
    steps = np.array(made.storage.stride())
    # By 4 bytes, whose atomics they are.
    at = (np.stack(picks) * steps[:, None]).sum(0) * made.storage.element_size() // 4 * 4
    found = l2.partitions(*probe(0, made.storage.data_ptr(), at, by_all=False))
    of_page = np.array([made.l2_partition.partition_of_page(int(page)) for page in picks[2]])
    of_head = np.array([(int(h) & made.l2_partition.heads).bit_count() % 2 for h in picks[4]])
    assert (found == of_page ^ of_head).mean() > 0.999
    assert 0.4 < found.mean() < 0.6
    assert not made.storage.view(torch.uint8).any()


@pytest.mark.parametrize(
    "other",
    [
        {"l2_partitioned": False},
        {"num_pages": 40},  # waste
        {"page_size": 32, "num_pages": 550},  # a head's page in both partitions
        {"num_kv_heads": 6, "num_pages": 1500},
        {"num_kv_heads": 1, "num_pages": 8500},
    ],
    ids=str,
)
def test_other_caches_lie_as_they_come(other: dict[str, int]) -> None:
    made = _cache(**other)
    assert made.l2_partition is None
    assert made.storage.is_contiguous()


def test_sequences_keep_to_one_half_each_and_share_both(cache: PagedKVCache) -> None:
    assert cache.l2_partition is not None
    counts = [0, 0]
    for sequence in range(20):
        cache.add(sequence)
        for length in (5, 100, 16 * 17):
            cache.reserve(sequence, length)
        found = {cache.l2_partition.partition_of_page(page) for page in cache.pages(sequence)}
        assert len(found) == 1
        counts[found.pop()] += 1
    assert counts == [10, 10]
    for sequence in range(20):
        cache.free(sequence)


def test_memory_of_caches_that_are_gone_is_given_back(cache: PagedKVCache) -> None:
    """Once no view is left, and not before; what others have of the GPU does not count."""
    driver = GraphDriver.load()
    addresses = []
    for _ in range(3):
        made = _cache()
        assert made.l2_partition is not None
        view = made.storage[1, 0, 5:7]
        view.fill_(1)
        addresses.append(made.storage.data_ptr())
        del made
        gc.collect()
        partitioned_memory.free_unused()
        assert driver.location_of(addresses[-1]) == "device 0"
        assert view.sum() == view.numel()
        del view
    gc.collect()
    partitioned_memory.free_unused()
    assert [driver.location_of(address) for address in addresses] == [None] * 3
    assert driver.location_of(cache.storage.data_ptr()) == "device 0"


def test_single_pages_make_up_for_pairs_that_are_missing(
    cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = partitioned_memory._create, []

    def fewer_pairs(cu: Any, device: int, count: int, size: int, owned: list[Any]) -> Any:
        asked.append(size)
        return real(
            cu, device, count if size == partitioned_memory.PAGE_BYTES else count // 2, size, owned
        )

    monkeypatch.setattr(partitioned_memory, "_create", fewer_pairs)
    made = _cache(num_layers=2)
    # Where there are fewer than asked for, there is no memory for more.
    assert asked[:2] == [2 * partitioned_memory.PAGE_BYTES, partitioned_memory.PAGE_BYTES]
    assert made.l2_partition is not None
    l2 = l2_map(0)
    assert l2 is not None
    pages = np.arange(made.storage.size(2))
    at = pages * made.storage.stride(2) * 2
    found = l2.partitions(*probe(0, made.storage.data_ptr(), at, by_all=False))
    assert found.tolist() == [made.l2_partition.partition_of_page(int(page)) for page in pages]


@pytest.mark.parametrize("last", [False, True])
def test_without_memory_for_it_a_cache_lies_as_it_comes(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = partitioned_memory._create

    def none(cu: Any, device: int, count: int, size: int, owned: list[Any]) -> Any:
        if last and size > partitioned_memory.PAGE_BYTES and not owned:
            return real(cu, device, count - 2, size, owned)
        return []

    monkeypatch.setattr(partitioned_memory, "_create", none)
    made = _cache()
    assert made.l2_partition is None
    assert made.storage.is_contiguous()


def _attend(
    cache: PagedKVCache, layer: int, inputs: tuple[torch.Tensor, ...], invariant: bool
) -> Callable[[ops.L2Partition | None], torch.Tensor]:
    q, table, lens = inputs
    stored = cache.layer(layer)
    k_scale, v_scale = stored.stored_scales

    def run(hint: ops.L2Partition | None) -> torch.Tensor:
        return ops.paged_attention(
            *(q, stored.k, stored.v, table, lens),
            k_scale=k_scale,
            v_scale=v_scale,
            batch_invariant=invariant,
            l2_partition=hint,
            out=torch.full_like(q, torch.nan),
        )

    return run


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("lengths", ["full", "mixed", "some empty", "short", "long"])
def test_no_hint_changes_a_bit(cache: PagedKVCache, invariant: bool, lengths: str) -> None:
    known = cache.l2_partition
    assert known is not None
    torch.manual_seed(0)
    batch, pages = (130, 5) if lengths != "long" else (40, 17)
    cache.storage.normal_()
    cache.storage[:, :, 0] = torch.nan
    table = (1 + torch.randperm(_PAGES - 1)[: batch * pages]).view(batch, pages).int()
    most = pages * 16
    lens = torch.full((batch,), most)
    if lengths != "full":
        lens = torch.randint(1 if lengths == "short" else most - 60, most + 1, (batch,))
    if lengths == "some empty":
        lens *= torch.rand(batch) < 0.8
    if lengths == "long":
        lens = lens.clamp(min=200)
    q = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device=CUDA)
    inputs = (q, table.to(CUDA), lens.int().to(CUDA))
    run = _attend(cache, 1, inputs, invariant)
    expected = run(None)
    assert bool((expected.isnan().any(dim=-1).any(dim=-1).cpu() == torch.zeros(batch)).all())
    wrong = ops.L2Partition([1 - partition for partition in known.sms], known.pages, known.heads)
    hints = [
        known,
        wrong,
        ops.L2Partition([0] * len(known.sms), known.pages, known.heads),
        ops.L2Partition([1] + [0] * 131, known.pages, known.heads),
        ops.L2Partition(known.sms, 0xFFFF, 0b110),
        ops.L2Partition(known.sms, 0, 0b100),
        ops.L2Partition(known.sms, 3, 0b1000),  # no KV head has that bit: as if not given
    ]
    for hint in hints * 3:
        assert torch.equal(run(hint), expected), hint


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("scales", ["static", "token"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_no_hint_changes_a_bit_of_8_bits(
    cache: PagedKVCache, dtype: torch.dtype, scales: str, invariant: bool
) -> None:
    made = _cache(dtype=dtype, scales=scales, num_pages=2100)
    assert made.l2_partition is not None
    made.randomize()
    batch, pages = 130, 9
    table = (1 + torch.randperm(2099)[: batch * pages]).view(batch, pages).int()
    lens = torch.randint(1, pages * 16 + 1, (batch,))
    q = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device=CUDA)
    run = _attend(made, 1, (q, table.to(CUDA), lens.int().to(CUDA)), invariant)
    expected = run(None)
    assert expected.isfinite().all()
    known = made.l2_partition
    for hint in (known, ops.L2Partition([1 - at for at in known.sms], known.pages, known.heads)):
        assert torch.equal(run(hint), expected)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(("batch", "most"), [(40, 2200), (160, 1100), (33, 1024)])
def test_nor_of_sequences_that_ctas_share(invariant: bool, batch: int, most: int) -> None:
    pages = -(-most // 16)
    long = _cache(num_layers=1, num_pages=1 + batch * pages)
    assert long.l2_partition is not None
    torch.manual_seed(batch)
    long.storage.normal_()
    q = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device=CUDA)
    table = 1 + torch.randperm(batch * pages).view(batch, pages)
    for least in (0, most // 2, most - 1):
        lens = torch.randint(least, most + 1, (batch,))
        run = _attend(long, 0, (q, table.int().to(CUDA), lens.int().to(CUDA)), invariant)
        expected = run(None)
        wrong = ops.L2Partition(long.l2_partition.sms, 0b1011, 0b101)
        for hint in (long.l2_partition, wrong) * 3:
            assert torch.equal(run(hint), expected)


def test_one_graph_over_many_lengths_and_tables(cache: PagedKVCache) -> None:
    """Claims and tickets of a launch start from what the one before it has left."""
    known = cache.l2_partition
    assert known is not None
    torch.manual_seed(1)
    batch, pages = 160, 4
    cache.storage.normal_()
    q = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device=CUDA)
    table = torch.zeros(batch, pages, dtype=torch.int32, device=CUDA)
    lens = torch.zeros(batch, dtype=torch.int32, device=CUDA)
    runs = [_attend(cache, layer, (q, table, lens), True) for layer in range(3)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run(known)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            # In a row, each launched before the one before it has ended.
            got = [run(known) for run in runs for _ in range(2)]
        for turn in range(60):
            table.copy_((1 + torch.randperm(_PAGES - 1)[: batch * pages]).view(batch, pages))
            least = (1, 30, 64)[turn % 3]
            lens.copy_(torch.randint(least, pages * 16 + 1, (batch,)))
            graph.replay()
            expected = [run(None) for run in runs for _ in range(2)]
            for mine, theirs in zip(got, expected, strict=True):
                assert torch.equal(mine, theirs), turn


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8", "int8"])
def test_texts_do_not_depend_on_halves(cache: PagedKVCache, kv_cache_dtype: str) -> None:
    """Of 64 requests at once that come and go, over pages that may run short in a partition."""
    assert _texts(CUDA, True, kv_cache_dtype) == _texts(CUDA, False, kv_cache_dtype)


def _texts(device: torch.device, l2_partitioned: bool, kv_cache_dtype: str) -> list[list[int]]:
    config = replace(
        read_config({**SHAPES["llama-3.1-8b"], "num_hidden_layers": 2}),
        hidden_size=1024,
        intermediate_size=1024,
        vocab_size=512,
    )
    model = random_decoder(config, "int8", device, max_context=1024)
    engine = Engine(
        model,
        number_tokenizer(config.vocab_size),
        max_batch=64,
        max_context=400,
        num_pages=_PAGES if kv_cache_dtype == "bf16" else 2 * _PAGES,
        l2_partitioned=l2_partitioned,
        kv_cache_dtype=kv_cache_dtype,
    )
    assert (engine.cache.l2_partition is not None) == (l2_partitioned and device.type == "cuda")
    random = torch.Generator().manual_seed(0)

    def length(most: int) -> int:
        return int(torch.randint(1, most, (1,), generator=random))

    prompts = [
        torch.randint(config.vocab_size, (length(300),), generator=random).tolist()
        for _ in range(90)
    ]
    params = [
        SamplingParams(max_tokens=length(60), temperature=i % 2 * 0.8, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    try:
        report = engine.capture([40, 64], progress=False)
        assert [f for graph in report.graphs for f in graph.findings or ()] == []
        return [list(text.token_ids) for text in engine.generate(prompts, params)]
    finally:
        engine.close()
