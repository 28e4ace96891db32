"""Prompts from captured graphs: which sizes there are, and what padding and old inputs change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine import Engine, SamplingParams, engine_sizes
from ostinato.engine.capture_examples import CaptureExamples
from ostinato.engine.decode_step import SeenTokens
from ostinato.engine.prefill_batch import PrefillBatch, TextBatch
from ostinato.engine.prefill_step import PREFILL, PrefillStep, prefill_sizes
from ostinato.graphs import CaptureError, GraphRunner, NotCapturedError, StaticBuffers
from ostinato.graphs.graph_key import Key
from ostinato.models import AttentionInputs, Decoder, PagedKVCache
from tiny import byte_tokenizer, tiny_llama

PAGE_SIZE, MAX_PAGES, MAX_CHUNK, SLOTS = 4, 8, 16, 6
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@given(st.integers(1, 1 << 20))
def test_sizes_rise_to_the_most(most: int) -> None:
    sizes = prefill_sizes(most)
    assert sizes[-1] == most
    assert sizes[0] <= 146
    assert len(sizes) <= 4 * most.bit_length()
    for smaller, larger in pairwise(sizes):
        step = 16 / 7 if smaller < 256 else 12 / 7 if smaller < 512 else 10 / 7
        assert smaller < larger <= smaller * step
        if larger <= min(most // 4, 2048):
            assert larger - smaller == 128


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (140, (140,)),
        (200, (128, 200)),
        (2048, (128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)),
    ],
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert prefill_sizes(most) == sizes


def _chunks(lengths: list[int], *, before: int = 0) -> dict[str, Any]:
    """Return a cache, and inputs of sequences of so many new tokens after others."""
    cache = PagedKVCache.for_model(
        tiny_llama().config, num_pages=64, page_size=PAGE_SIZE, device="cpu"
    )
    cache.storage.normal_(generator=torch.Generator().manual_seed(5))
    slots: list[int] = []
    for sequence, length in enumerate(lengths):
        cache.add(sequence)
        cache.reserve(sequence, before + length)
        slots += cache.slots(sequence, before, before + length)
    total = sum(lengths)
    return {
        "cache": cache,
        "tokens": torch.randint(256, (total,), generator=torch.Generator().manual_seed(total)),
        "positions": torch.cat([torch.arange(before, before + n) for n in lengths]).int(),
        "slot_mapping": torch.tensor(slots),
        "slots": torch.full((total,), SLOTS),
        "cu_seqlens": [0, *torch.tensor(lengths).cumsum(0).tolist()],
        "seq_lens": [before + n for n in lengths],
        "page_table": cache.page_table(list(range(len(lengths))), MAX_PAGES),
    }


def _direct(model: Decoder, chunks: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return what the model makes of the chunks, and the cache after it."""
    cache = chunks["cache"]
    before = cache.storage.clone()
    attention = AttentionInputs(
        slot_mapping=chunks["slot_mapping"],
        page_table=chunks["page_table"],
        seq_lens=torch.tensor(chunks["seq_lens"], dtype=torch.int32),
        cu_seqlens_q=torch.tensor(chunks["cu_seqlens"], dtype=torch.int32),
        max_seqlen_q=MAX_CHUNK,
    )
    x, residual = model.hidden(chunks["tokens"], chunks["positions"], attention, cache)
    after = cache.storage.clone()
    cache.storage.copy_(before)
    return x, residual, after


def _step(model: Decoder, cache: PagedKVCache, sequences: PrefillBatch) -> PrefillStep:
    seen = SeenTokens(SLOTS, model.config.vocab_size, torch.device("cpu"))
    texts = TextBatch(SLOTS, MAX_PAGES, torch.device("cpu"))
    examples = CaptureExamples(cache, 8)
    return PrefillStep(model, cache, seen, texts, sequences, MAX_CHUNK, None, examples)


@pytest.mark.parametrize("scheme", ["plain", "int8", "fp8"])
def test_padding_and_what_was_computed_before_change_no_bit(scheme: str) -> None:
    model = tiny_llama(scheme=scheme)
    most = 6
    sequences = PrefillBatch(most, MAX_PAGES, torch.device("cpu"))
    for bucket in (1, 2, 7, 32):
        # The longest first: what it leaves in the memory of the sequences is read by nobody.
        for lengths in ([16, 1, 9, 3], [2, 5], [1] * 6, [7], [2], [1, 1], [1]):
            if sum(lengths) > bucket:
                continue
            chunks = _chunks(lengths, before=5)
            cache = chunks["cache"]
            step = _step(model, cache, sequences)
            buffers = StaticBuffers(step.buffer_specs(), bucket, "cpu")
            runner = GraphRunner(step, buffers)
            runner.capture([bucket], verify=False)
            x, residual, storage = _direct(model, chunks)
            sequences.write(chunks["cu_seqlens"], chunks["seq_lens"], chunks["page_table"])
            inputs = {name: chunks[name] for name in buffers.specs}
            got = runner.run(sum(lengths), inputs)
            assert torch.equal(got["x"], x)
            assert torch.equal(got["residual"], residual)
            assert torch.equal(cache.storage, storage)


def test_a_warm_up_writes_nothing_whatever_sequences_were_there() -> None:
    chunks = _chunks([16, 16])
    cache = chunks["cache"]
    sequences = PrefillBatch(4, MAX_PAGES, torch.device("cpu"))
    sequences.write(chunks["cu_seqlens"], chunks["seq_lens"], chunks["page_table"])
    step = _step(tiny_llama(), cache, sequences)
    before = cache.storage.clone()
    GraphRunner(step, StaticBuffers(step.buffer_specs(), 8, "cpu")).capture([8], verify=False)
    assert torch.equal(cache.storage, before)


@pytest.mark.parametrize("scheme", ["plain", "int8", "fp8"])
@pytest.mark.parametrize("counts", [[4, 1, 0, 2], [0, 6, 3]])
def test_texts_beside_prompts_have_the_bits_of_calls_of_their_own(
    scheme: str, counts: list[int]
) -> None:
    """Whatever texts were there in the call before; their tokens are marked as seen."""
    model = tiny_llama(scheme=scheme)
    chunks = _chunks([1] * SLOTS + [5, 2], before=7)
    cache, before = chunks["cache"], chunks["cache"].storage.clone()
    device, vocabulary = torch.device("cpu"), model.config.vocab_size
    seen, texts = SeenTokens(SLOTS, vocabulary, device), TextBatch(SLOTS, MAX_PAGES, device)
    sequences = PrefillBatch(2, MAX_PAGES, device)
    examples = CaptureExamples(cache, 8)
    step = PrefillStep(model, cache, seen, texts, sequences, MAX_CHUNK, None, examples)
    buffers = StaticBuffers(step.buffer_specs(), 16, "cpu")
    runner = GraphRunner(step, buffers)
    runner.capture([16], verify=False)
    lengths = torch.tensor(chunks["seq_lens"], dtype=torch.int32)
    for count in counts:
        rows = [*range(count), *range(SLOTS, SLOTS + 7)]
        prompts = torch.tensor([0, 5, 7], dtype=torch.int32)
        own = {name: chunks[name][rows] for name in ("tokens", "positions", "slot_mapping")}
        expected = []
        for part, sequence, how in (
            (slice(count), slice(count), {}),
            (slice(count, None), slice(SLOTS, None), {"cu_seqlens_q": prompts, "max_seqlen_q": 16}),
        ):
            attention = AttentionInputs(
                own["slot_mapping"][part],
                chunks["page_table"][sequence],
                lengths[sequence],
                **how,
            )
            if part == slice(count) and not count:
                continue
            at = own["positions"][part]
            expected.append(model.hidden(own["tokens"][part], at, attention, cache))
        after = cache.storage.clone()
        cache.storage.copy_(before)
        texts.write(lengths[:count], chunks["page_table"][:count])
        sequences.write(
            (count + prompts).tolist(), lengths[SLOTS:].tolist(), chunks["page_table"][SLOTS:]
        )
        seen.mask.zero_()
        slots = torch.tensor([*range(count), *[SLOTS] * 7])
        got = runner.run(len(rows), {**own, "slots": slots})
        for name, index in (("x", 0), ("residual", 1)):
            assert torch.equal(got[name], torch.cat([each[index] for each in expected]))
        assert torch.equal(cache.storage, after)
        cache.storage.copy_(before)
        marked = seen.mask[:SLOTS].nonzero().tolist()
        assert marked == [[slot, int(own["tokens"][slot])] for slot in range(count)]


def test_texts_behind_those_written_are_none() -> None:
    texts = TextBatch(3, 2, torch.device("cpu"))
    table = torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int32)
    texts.write(torch.tensor([4, 11, 12], dtype=torch.int32), table)
    texts.write(torch.tensor([3], dtype=torch.int32), table[1:2])
    assert texts.first(2).seq_lens.tolist() == [3, 0]
    assert texts.first(2).page_table[0].tolist() == [7, 8]
    whole = texts.first(100)
    assert whole.seq_lens.tolist() == [3, 0, 0]
    assert whole.page_table.shape == (3, 2)
    assert whole.seq_lens.data_ptr() == texts.first(1).seq_lens.data_ptr()


def test_sequences_behind_those_written_are_empty() -> None:
    sequences = PrefillBatch(3, 2, torch.device("cpu"))
    table = torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int32)
    sequences.write([0, 4, 5, 9], [4, 11, 12], table)
    sequences.write([0, 2], [3], table[1:2])
    views = sequences.first(2)
    assert views.cu_seqlens.tolist() == [0, 2, 2]
    assert views.seq_lens.tolist() == [3, 0]
    assert views.page_table[0].tolist() == [7, 8]
    whole = sequences.first(100)
    assert whole.cu_seqlens.tolist() == [0, 2, 2, 2]
    assert whole.page_table.shape == (3, 2)
    assert whole.page_table.data_ptr() == views.page_table.data_ptr()


@pytest.mark.parametrize("options", [{}, {"max_batch": 1}, {"max_context": 10}, {"max_batch": 200}])
def test_each_token_of_an_example_belongs_to_a_sequence(options: dict[str, Any]) -> None:
    engine = _engine(**options)
    prefill = engine._prefill
    with engine._capture_examples.lent():
        prefill._write_examples()
    views = prefill._prefill_batch.first(1 << 20)
    rows = views.cu_seqlens.diff()
    capacity = views.page_table.size(1) * PAGE_SIZE
    assert rows.min() >= 1
    assert rows.max() <= min(prefill._max_chunk, capacity)
    assert views.cu_seqlens[-1] >= prefill._max_tokens
    texts = prefill._text_batch.first(1 << 20)
    count = int(views.cu_seqlens[0])
    # Both are in the smallest graph.
    assert 0 < count < prefill_sizes(prefill._max_tokens)[0]
    assert (texts.seq_lens > 0).tolist() == [slot < count for slot in range(len(texts.seq_lens))]
    assert texts.page_table[:count].min() >= 1
    assert (views.seq_lens >= rows).all()
    assert views.seq_lens.max() <= capacity
    assert views.page_table.min() >= 1


@pytest.mark.parametrize(("unit", "joined"), [(4, True), (16, False)])
def test_a_step_has_room_for_chunks_that_are_computed_as_one(
    unit: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more: torch's operators take their time by the capacity."""
    monkeypatch.setattr(engine_sizes, "sharing_unit", lambda *_: unit)
    prefill = _engine()._prefill
    assert prefill._max_chunk == (4 * 127 if joined else 16)
    assert prefill._max_tokens == 4 * 127


def test_examples_have_no_more_tokens_than_there_is_room_for() -> None:
    engine = _engine(max_batch=40)
    prefill = engine._prefill
    prefill._max_tokens_k = room = prefill._max_tokens + 200
    with engine._capture_examples.lent():
        prefill._write_examples()
    views = prefill._prefill_batch.first(1 << 20)
    with_rows = torch.minimum(views.cu_seqlens, torch.tensor(prefill._max_tokens)).diff() > 0
    tokens = int(views.seq_lens[with_rows].sum())
    assert prefill._max_tokens < tokens <= room


def _engine(device: torch.device | str = "cpu", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_chunk": 16}
    return Engine(tiny_llama(device), byte_tokenizer(), **{**defaults, **options})


@pytest.mark.gpu
def test_graphs_of_prompts_come_first_in_the_report() -> None:
    report = _engine("cuda", prefill_chunk=128).capture([1, 4], progress=False)
    # Four prompts of at most 127 tokens: all but the last of a text.
    prompts = [Key(size, PREFILL) for size in prefill_sizes(4 * 127)]
    assert [graph.key for graph in report.graphs] == [*prompts, Key(1), Key(4)]
    assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
    assert str(report).startswith(f"{len(prompts) + 2} graphs captured on ")


def test_on_a_cpu_nothing_is_captured_or_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    assert [graph.key for graph in engine.capture([1], progress=False).graphs] == [Key(1)]
    computed = []
    hidden = engine.model.hidden

    def watched(tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
        computed.append(len(tokens))
        return hidden(tokens, *args, **options)

    monkeypatch.setattr(engine.model, "hidden", watched)
    engine.generate([[7] * 5, [9] * 41], SamplingParams(max_tokens=1))
    assert computed == [5 + 41]


_MOST = [
    ({}, 4 * 127),
    ({"max_prefill_tokens": 100}, 100),
    ({"max_prefill_tokens": 40}, 40),
    ({"max_prefill_tokens": 3}, 16 + 4),
    ({"max_context": 10}, 4 * 9),
    ({"max_batch": 1, "max_context": 10}, 9),
]


@pytest.mark.parametrize(("options", "most"), _MOST)
def test_a_step_may_be_as_large_as_can_be(
    options: dict[str, Any], most: int, device: torch.device
) -> None:
    engine = _engine(device, **options)
    report = engine.capture([1], progress=False)
    if device.type == "cuda":
        assert [g.batch_size for g in report.graphs if g.variant][-1] == most
    prompts = [[7] * min(engine.max_context - 1, 127)] * 5
    for completion in engine.generate(prompts, SamplingParams(max_tokens=1)):
        assert len(completion.token_ids) == 1


@pytest.mark.gpu
def test_without_graphs_of_prompts_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine("cuda")
    expected = _engine("cuda")
    expected.capture([1], progress=False)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._prefill._runner._captured, "_step", fail)
        with pytest.raises(CaptureError, match="prefill"):
            engine.capture([1], progress=False)
    with pytest.raises(NotCapturedError):
        engine.generate(["abc"], PARAMS)
    engine.capture([1], progress=False)
    completions = [e.generate(["abc"], PARAMS)[0] for e in (engine, expected)]
    assert completions[0].token_ids == completions[1].token_ids


@pytest.mark.gpu
def test_steps_on_streams_in_turn_change_no_token() -> None:
    engine = _engine("cuda")
    engine.capture([1, 2, 4], progress=False)
    prompts = [[11 * i + j for j in range(23 + i)] for i in range(7)]
    expected = [c.token_ids for c in engine.generate(prompts, PARAMS)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    ids = [engine.submit(prompt, PARAMS) for prompt in prompts]
    step = 0
    while not engine.idle:
        with torch.cuda.stream(streams[step % 3]):
            engine.step()
        step += 1
    assert [engine.result(request).token_ids for request in ids] == expected
