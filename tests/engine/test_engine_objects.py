"""What an engine leaves behind: no objects per prompt length, no other random numbers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping

import torch

from ostinato.engine import Engine, SamplingParams
from tiny import byte_tokenizer, tiny_llama


def census() -> Counter[str]:
    """Return how many objects of each type the garbage collector knows."""
    gc.unfreeze()
    gc.collect()
    found: Counter[str] = Counter()
    for known in gc.get_objects():  # `Counter(names)` would make objects: see the test of it
        found[f"{type(known).__module__}.{type(known).__qualname__}"] += 1
    gc.freeze()  # as `conftest` does, for the tests behind this one
    return found


def test_a_census_leaves_no_objects_behind() -> None:
    """An argument of `Counter` is looked up in each subclass of Mapping, which remembers its type.

    That is two objects for each class since the last one, such as those that a server brings.
    """
    kept = [type(f"Mapping{number}", (Mapping,), {}) for number in range(60)]
    before = census()
    assert sum((census() - before).values()) < len(kept)


def test_objects_do_not_grow_with_lengths_of_prompts() -> None:
    engine = Engine(tiny_llama(), byte_tokenizer(), max_batch=4, page_size=4, prefill_chunk=64)
    engine.capture(progress=False)
    one_token = SamplingParams(max_tokens=1)

    def serve(lengths: range) -> None:
        for length in lengths:
            engine.generate([[7] * length], one_token)

    serve(range(1, 9))
    before = census()
    lengths = range(9, 60)
    serve(lengths)
    after = census()
    assert sum((after - before).values()) < len(lengths), (after - before).most_common(6)
    assert after["torch.Tensor"] == before["torch.Tensor"]


def test_capture_leaves_the_callers_random_numbers_alone(device: torch.device) -> None:
    engine = Engine(tiny_llama(device), byte_tokenizer(), max_batch=2, num_pages=40)
    torch.manual_seed(1)
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    engine.capture(progress=False)
    assert torch.equal(states[0], torch.get_rng_state())
    if device.type == "cuda":
        assert torch.equal(states[1], torch.cuda.get_rng_state(device))


def test_verification_reads_the_same_pages_whatever_the_seed(device: torch.device) -> None:
    pages = []
    for seed in (1, 2):
        engine = Engine(tiny_llama(device), byte_tokenizer(), max_batch=2, num_pages=40)
        torch.manual_seed(seed)
        with engine._capture_examples.lent():
            pages.append(engine.cache.storage.clone())
    assert pages[0].any()
    assert torch.equal(*pages)
