"""Scheduling: order, atomic admission, preemption, and that no load deadlocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine import SamplingParams
from ostinato.engine.detokenizer import Detokenizer
from ostinato.engine.request import Request
from ostinato.engine.scheduler import Scheduler
from ostinato.models import PagedKVCache
from tiny import byte_tokenizer

PAGE = 4
TOKENIZER = byte_tokenizer()


def make_scheduler(
    pages: int, max_batch: int = 4, chunk: int = 8, unit: int | None = None, **options: int
) -> Scheduler:
    cache = PagedKVCache(
        num_layers=1,
        num_pages=pages + 1,
        page_size=PAGE,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device="cpu",
    )
    how = {"max_batch": max_batch, "prefill_chunk": chunk, "sharing_unit": unit}
    return Scheduler(cache, **how, **options)


def make_request(number: int, prompt: int, new_tokens: int, fill: int | None = None) -> Request:
    tokens = tuple((number if fill is None else fill) for _ in range(prompt))
    return Request(
        id=number,
        prompt=tokens,
        sampling_params=SamplingParams(),
        seed=0,
        max_new_tokens=new_tokens,
        stop_ids=frozenset(),
        detokenizer=Detokenizer(TOKENIZER, tokens, ()),
    )


@dataclass
class Step:
    admitted: list[int]
    decoded: list[int]
    prefilled: list[tuple[int, int, int]]


def step(scheduler: Scheduler, budget: int = 16) -> Step:
    """Do what the engine does, with token 1 for every token sampled."""
    before = list(scheduler.running)
    scheduler.admit()
    admitted = [request.id for request in scheduler.running if request not in before]
    batch = scheduler.decode_batch()
    chunks = scheduler.prefill_chunks(budget)
    scheduler.computed(chunks)
    last = [chunk.request for chunk in chunks if chunk.ends_prompt]
    for request in [*batch, *last]:
        request.accept(1)
        if request.finish_reason:
            scheduler.finish(request)
    return Step(
        admitted,
        [request.id for request in batch],
        [(chunk.request.id, chunk.start, chunk.stop) for chunk in chunks],
    )


def test_first_come_first_served_within_slots() -> None:
    scheduler = make_scheduler(pages=20, max_batch=2)
    for number in range(3):
        scheduler.submit(make_request(number, prompt=3, new_tokens=2))
    first = step(scheduler)
    assert first == Step([0, 1], [], [(0, 0, 3), (1, 0, 3)])
    assert step(scheduler).decoded == [0, 1]
    assert step(scheduler).admitted == [2]


def test_as_many_run_as_the_pages_hold_to_their_end() -> None:
    scheduler = make_scheduler(pages=12)
    for number in range(4):
        scheduler.submit(make_request(number, prompt=5, new_tokens=8))
    assert step(scheduler).admitted == [0, 1, 2, 3]
    while not scheduler.idle:
        step(scheduler)
    assert scheduler.preemptions == 0


def test_chunks_of_prompts_end_at_multiples_of_the_chunk() -> None:
    scheduler = make_scheduler(pages=30, chunk=8)
    scheduler.submit(make_request(0, prompt=19, new_tokens=1))
    scheduler.submit(make_request(1, prompt=5, new_tokens=1))
    assert step(scheduler, budget=9).prefilled == [(0, 0, 8)]
    assert step(scheduler, budget=13).prefilled == [(0, 8, 16), (1, 0, 5)]
    assert step(scheduler, budget=1).prefilled == [(0, 16, 19)]
    assert scheduler.idle


def test_budget_that_is_left_goes_to_further_chunks() -> None:
    scheduler = make_scheduler(pages=30, chunk=8)
    for number, prompt in enumerate((30, 3, 17)):
        scheduler.submit(make_request(number, prompt=prompt, new_tokens=1))
    first = step(scheduler, budget=40).prefilled
    assert first == [(0, 0, 8), (1, 0, 3), (2, 0, 8), (0, 8, 16), (2, 8, 16)]
    assert step(scheduler, budget=40).prefilled == [(0, 16, 24), (2, 16, 17), (0, 24, 30)]
    assert scheduler.idle


def test_chunks_of_a_prompt_are_computed_as_one_where_bits_allow_it() -> None:
    scheduler = make_scheduler(pages=40, chunk=8, unit=4)
    for number, prompt in enumerate((30, 3, 17)):
        scheduler.submit(make_request(number, prompt=prompt, new_tokens=1))
    assert step(scheduler, budget=40).prefilled == [(0, 0, 16), (1, 0, 3), (2, 0, 16)]
    assert step(scheduler, budget=40).prefilled == [(0, 16, 30), (2, 16, 17)]
    assert scheduler.idle


@pytest.mark.parametrize(
    ("texts", "prompts", "length", "tokens"),
    [
        (8, 1, 8, 4),  # no fewer texts than prompts: a quarter
        (8, 4, 8, 4),
        (8, 2, 4, 8),  # the last prompts of many: all that is left
        (1, 2, 8, 16),  # more prompts than texts
        (1, 2, 16, 16),
        (1, 3, 16, 8),  # more than two steps: half
        (0, 5, 16, 8),
    ],
)
def test_texts_wait_for_part_of_a_steps_tokens(
    texts: int, prompts: int, length: int, tokens: int
) -> None:
    scheduler = make_scheduler(pages=100, chunk=4, max_batch=16)
    for number in range(texts):
        scheduler.submit(make_request(number, prompt=1, new_tokens=50))
    while any(not request.prefilled for request in scheduler.running) or scheduler.waiting:
        step(scheduler, budget=16)
    for number in range(prompts):
        scheduler.submit(make_request(texts + number, prompt=length, new_tokens=1))
    done = step(scheduler, budget=16).prefilled
    assert sum(stop - start for _, start, stop in done) == tokens


def test_tokens_of_texts_beside_prompts_count() -> None:
    scheduler = make_scheduler(pages=40, chunk=8)
    for number in range(2):
        scheduler.submit(make_request(number, prompt=24, new_tokens=1))
    scheduler.admit()
    for beside, tokens in ((0, 32), (1, 24), (17, 8), (100, 8)):
        chunks = scheduler.prefill_chunks(32, beside)
        assert sum(chunk.stop - chunk.start for chunk in chunks) == tokens


def test_a_step_sees_as_many_tokens_as_there_is_room_for() -> None:
    """Each chunk, or those that are computed as one, all before its end; one has room always."""
    for unit, first in ((4, [(0, 0, 8), (1, 0, 8), (2, 0, 8)]), (8, [(0, 0, 8), (1, 0, 8)])):
        scheduler = make_scheduler(pages=40, chunk=8, unit=unit, max_tokens_k=25)
        for number in range(3):
            scheduler.submit(make_request(number, prompt=24, new_tokens=1))
        done = []
        while not scheduler.idle:
            done.append(step(scheduler, budget=100).prefilled)
            assert sum(stop for _, _, stop in done[-1]) <= 25
        assert done[0][: len(first)] == first
        assert sum(stop - start for chunks in done for _, start, stop in chunks) == 3 * 24


def test_the_newest_request_is_preempted_and_resumed() -> None:
    scheduler = make_scheduler(pages=5)
    for number in range(2):
        scheduler.submit(make_request(number, prompt=7, new_tokens=6))
    assert step(scheduler).admitted == [0, 1]
    assert step(scheduler).decoded == [0, 1]
    # Position 8 needs a third page for each of them; one is left.
    assert step(scheduler).decoded == [0]
    assert [r.id for r in scheduler.waiting] == [1]
    while scheduler.running:
        last = step(scheduler)
        assert (last.admitted, last.decoded) == ([], [0])
    assert step(scheduler) == Step([1], [1], [])
    while not scheduler.idle:
        step(scheduler)
    assert scheduler.preemptions == 1
    assert scheduler.cache.free_pages == 5


def test_a_request_waits_rather_than_starve_running_ones() -> None:
    scheduler = make_scheduler(pages=4)
    scheduler.submit(make_request(0, prompt=4, new_tokens=8))
    scheduler.submit(make_request(1, prompt=12, new_tokens=1))
    assert step(scheduler).admitted == [0]
    free = scheduler.cache.free_pages
    assert step(scheduler).admitted == []
    assert scheduler.cache.free_pages >= free - 1
    while not scheduler.idle:
        step(scheduler)
    assert scheduler.preemptions == 0


def test_only_whole_chunks_of_a_prompt_are_shared() -> None:
    scheduler = make_scheduler(pages=30, chunk=8)
    scheduler.submit(make_request(0, prompt=15, new_tokens=1, fill=7))
    while not scheduler.idle:
        step(scheduler)
    scheduler.submit(make_request(1, prompt=20, new_tokens=1, fill=7))
    assert step(scheduler).prefilled == [(1, 8, 16), (1, 16, 20)]
    # All of the prompt is known now, but its last token must be computed for its logits.
    while not scheduler.idle:
        step(scheduler)
    scheduler.submit(make_request(2, prompt=16, new_tokens=1, fill=7))
    assert step(scheduler).prefilled == [(2, 8, 16)]


def test_parts_of_chunks_are_shared_where_bits_allow_it() -> None:
    scheduler = make_scheduler(pages=30, chunk=16, unit=8)
    scheduler.submit(make_request(0, prompt=31, new_tokens=1, fill=7))
    while not scheduler.idle:
        step(scheduler)
    scheduler.submit(make_request(1, prompt=40, new_tokens=1, fill=7))
    # Further chunks begin at multiples of the chunk again.
    assert step(scheduler, budget=8).prefilled == [(1, 24, 32)]
    assert step(scheduler, budget=8).prefilled == [(1, 32, 40)]
    scheduler.submit(make_request(2, prompt=12, new_tokens=1, fill=7))
    assert step(scheduler).prefilled == [(2, 8, 12)]


def test_a_waiting_request_evicts_no_kept_prefix() -> None:
    scheduler = make_scheduler(pages=8)
    scheduler.submit(make_request(0, prompt=9, new_tokens=1, fill=7))
    while not scheduler.idle:
        step(scheduler)
    scheduler.submit(make_request(1, prompt=8, new_tokens=12))
    scheduler.submit(make_request(2, prompt=25, new_tokens=1))
    step(scheduler)
    step(scheduler)
    assert [r.id for r in scheduler.waiting] == [2]
    assert scheduler.cache.add(99, [7] * 8) == 8


def test_an_error_in_placing_a_request_leaves_it_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(pages=5)
    scheduler.submit(make_request(0, prompt=9, new_tokens=2))

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.cache, "reserve", fail)
        with pytest.raises(MemoryError):
            scheduler.admit()
    assert scheduler.cache.free_pages == 5
    while not scheduler.idle:
        step(scheduler)
    assert scheduler.cache.free_pages == 5


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "swapped"])
def test_finishing_frees_everything_wherever_the_request_is(phase: str) -> None:
    scheduler = make_scheduler(pages=5)
    request = make_request(1, prompt=12, new_tokens=4)
    if phase == "swapped":
        older = make_request(0, prompt=7, new_tokens=12)
        request = make_request(1, prompt=3, new_tokens=12)
        scheduler.submit(older)
        scheduler.submit(request)
        for _ in range(11):
            step(scheduler)
        assert request.swapped is not None
        scheduler.finish(older)
    else:
        scheduler.submit(request)
        for _ in range(["waiting", "prefilling", "decoding"].index(phase)):
            step(scheduler, budget=1)
        assert (request.computed > 0) == (phase != "waiting")
        assert request.prefilled == (phase == "decoding")
    scheduler.finish(request)
    assert scheduler.idle
    assert scheduler.cache.free_pages == 5


@settings(max_examples=150)
@given(
    pages=st.integers(4, 9),
    max_batch=st.integers(1, 5),
    budget=st.integers(1, 40),
    shapes=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2), st.integers(0, 6)),
        min_size=1,
        max_size=10,
    ),
)
def test_every_load_ends(
    pages: int, max_batch: int, budget: int, shapes: list[tuple[int, int, int, int]]
) -> None:
    """Requests of (prompt, new tokens, fill, arrival step), each small enough to fit alone."""
    scheduler = make_scheduler(pages, max_batch)
    requests = [
        (arrival, make_request(number, prompt, new, fill))
        for number, (prompt, new, fill, arrival) in enumerate(shapes)
    ]
    pending = sorted(requests, key=lambda pair: pair[0])
    for now in range(2000):
        while pending and pending[0][0] <= now:
            scheduler.submit(pending.pop(0)[1])
        held = {page for r in scheduler.running for page in scheduler.cache.pages(r.id)}
        assert scheduler.cache.free_pages + len(held) == pages
        assert len({r.slot for r in scheduler.running}) == len(scheduler.running) <= max_batch
        if scheduler.idle and not pending:
            break
        step(scheduler, budget)
    assert scheduler.idle
    assert not pending
    assert all(len(r.generated) == r.max_new_tokens for _, r in requests)
    assert scheduler.cache.free_pages == pages
