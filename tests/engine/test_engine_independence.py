"""A request's tokens do not depend on what runs beside it, load or sharing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from engines import SCHEMES, TOKENIZER, greedy, make_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_beginnings import check_shared_beginnings

from effort import effort, on_devices
from ostinato.engine import FinishReason, SamplingParams
from ostinato.models import RopeConfig
from ostinato.ops.attention import prefill_cuda
from ostinato.ops.attention.prefill_cuda import attend_paged
from tiny import KV_CACHES, tiny_llama

# Of linear layers, and the kind of the KV cache.
SERVED = [
    *((scheme, "model") for scheme in SCHEMES),
    *(("plain", cache) for cache in KV_CACHES if cache != "model"),
    ("int8", "fp8"),
]
SAMPLE = [("plain", "model"), ("int8", "fp8")]
SAMPLED_CACHES = ["model", "fp8_static"]

served = pytest.mark.parametrize(
    ("device", "scheme", "cache"), on_devices(SAMPLE, SERVED), indirect=["device"]
)
cached = pytest.mark.parametrize(
    ("device", "cache"),
    on_devices(((cache,) for cache in SAMPLED_CACHES), ((cache,) for cache in KV_CACHES)),
    indirect=["device"],
)


# Tokens, and what tells the texts of one length apart; the second begins as the first.
LONG_PROMPTS = ((1300, 1), (900, 1), (450, 3), (513, 5), (40, 7), (3, 2))


REQUESTS = st.lists(
    st.tuples(
        # Few beginnings of more than one chunk, so that prefixes are shared.
        st.builds(
            str.__add__,
            st.sampled_from(["", "a common beginning, ", "another one of 19, "]),
            st.text(alphabet="abcdef ", min_size=1, max_size=12),
        ),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 14),
            temperature=st.sampled_from([0.0, 0.8, 1.5]),
            top_k=st.sampled_from([0, 5, 300]),
            top_p=st.sampled_from([0.6, 1.0]),
            min_p=st.sampled_from([0.0, 0.02]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            seed=st.integers(0, 2**40),
        ),
    ),
    min_size=1,
    max_size=6,
)


class Pair:
    """One engine with room for everything one by one, one that is crowded and short of pages."""

    def __init__(self, device: torch.device, scheme: str, cache: str) -> None:
        model = tiny_llama(device, scheme, cache=cache)
        self.alone = make_engine(model=model, cache=cache, max_batch=1, batch_sizes=[1])
        self.crowded = make_engine(
            model=model,
            cache=cache,
            batch_sizes=[1, 3],
            max_context=48,
            num_pages=14,
            max_prefill_tokens=8,
        )


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[tuple[str, str, str], Pair]]:
    made: dict[tuple[str, str, str], Pair] = {}
    yield made
    for pair in made.values():
        pair.alone.close()
        pair.crowded.close()


@served
@settings(
    max_examples=effort(8, 20),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests=REQUESTS)
def test_tokens_do_not_depend_on_neighbours_load_or_preemption(
    scheme: str,
    cache: str,
    device: torch.device,
    pairs: dict[tuple[str, str, str], Pair],
    requests: list[tuple[str, SamplingParams]],
) -> None:
    key = (device.type, scheme, cache)
    if key not in pairs:
        pairs[key] = Pair(device, scheme, cache)
    pair = pairs[key]
    prompts = [prompt for prompt, _ in requests]
    params = [p for _, p in requests]
    together = pair.crowded.generate(prompts, params)
    for prompt, p, completion in zip(prompts, params, together, strict=True):
        (expected,) = pair.alone.generate([prompt], p)
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text


@cached
def test_forced_preemption_changes_no_token(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, "int8", cache=cache)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, repetition_penalty=1.2)
    prompts = [f"prompt {i}" for i in range(6)]
    roomy = make_engine(model=model, cache=cache)
    tight = make_engine(model=model, cache=cache, max_context=32, num_pages=12)
    expected = roomy.generate(prompts, params)
    got = tight.generate(prompts, params)
    assert tight.stats.preemptions > 0
    assert roomy.stats.preemptions == 0
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


@cached
def test_shared_prefixes_save_work_and_change_no_token(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, "int8", cache=cache)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prefix = "0123456789abcdef"
    prompts = [prefix + "x", prefix + "y and more", prefix]
    fresh = [
        make_engine(model=model, cache=cache).generate([prompt], params)[0] for prompt in prompts
    ]
    engine = make_engine(model=model, cache=cache)
    shared = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert [c.token_ids for c in shared] == [c.token_ids for c in fresh]
    # The last prompt computes its last page, or its second chunk, again: logits of its last token
    # are needed.
    again = 4 if device.type == "cpu" else 8
    assert engine.stats.prefill_tokens == 17 + 10 + again


@pytest.mark.parametrize(("scheme", "cache"), effort(SAMPLE, SERVED))
def test_prefixes_shared_by_the_page_change_no_bit(scheme: str, cache: str) -> None:
    options = {"prefill_chunk": 32, "max_context": 128, "logits_processing": True}
    engine = make_engine("cpu", scheme, [1], cache=cache, **options)
    base = [(7 * at + at // 11) % 200 + 40 for at in range(91)]
    check_shared_beginnings(engine, base, [4, 28, 32, 44, 60, 64, 88])


SAMPLINGS: list[tuple[str, dict[str, Any]]] = [
    *((scheme, {}) for scheme in SCHEMES),
    ("plain", {"temperature": 0.8}),
    ("int8", {"temperature": 0.8, "top_k": 3, "top_p": 0.5, "min_p": 0.1}),
    ("plain", {"repetition_penalty": 1.3}),
    ("fp8", {"temperature": 1.0, "repetition_penalty": 1.3}),
]


@pytest.mark.parametrize(
    ("device", "cache", "scheme", "how"),
    on_devices(
        [*(("model", *sampling) for sampling in SAMPLINGS[2:]), ("int8", *SAMPLINGS[-1])],
        ((cache, *sampling) for cache in KV_CACHES for sampling in SAMPLINGS),
        gpu=((cache, *sampling) for cache, sampling in zip(cycle(KV_CACHES), SAMPLINGS)),
    ),
    indirect=["device"],
    ids=str,
)
def test_logits_that_are_nan_end_their_text_alone(
    device: torch.device, cache: str, scheme: str, how: dict[str, Any]
) -> None:
    model = tiny_llama(device, scheme, cache=cache)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=5, **how)
    others = make_engine(model=model, cache=cache).generate(["abc", "de"], params)
    used = {*TOKENIZER.encode("abcde").ids, *others[0].token_ids, *others[1].token_ids}
    unused = next(token for token in range(256) if token not in used)
    broken = tiny_llama(device, scheme, cache=cache)
    embedding = next(tensor for tensor in broken.tensors() if tensor.shape[0] == 257)
    embedding[unused] = torch.nan
    engine = make_engine(model=broken, cache=cache)
    found = engine.generate(["abc", [97, unused, 98], "de"], params)
    assert [found[0].text, found[2].text] == [other.text for other in others]
    assert [found[0].token_ids, found[2].token_ids] == [other.token_ids for other in others]
    assert found[1].finish_reason is FinishReason.ERROR
    assert found[1].token_ids == ()
    assert found[1].text == ""
    assert engine.stats.failed_requests == 1
    assert engine.idle
    assert engine.generate(["abc"], params)[0].token_ids == others[0].token_ids


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("cache", ["model", "fp8", "int8"])
def test_prefixes_shared_by_the_tile_change_no_bit(cache: str) -> None:
    sizes = {"head_dim": 128, "max_position_embeddings": 2048}
    model = tiny_llama("cuda", "int8", cache=cache, dtype=torch.bfloat16, **sizes)
    options = {"page_size": 16, "prefill_chunk": 512, "logits_processing": True}
    engine = make_engine(model=model, cache=cache, batch_sizes=[1], max_context=1600, **options)
    base = [(7 * at + at // 11) % 200 + 40 for at in range(1500)]
    check_shared_beginnings(engine, base, [128, 256, 384, 512, 896, 1024, 1408])


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.nvcc
@pytest.mark.parametrize("head_dim", [64, 128])
def test_our_prefill_kernel_changes_no_token(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do neighbours, shared prefixes and, at multiples of 384, the size of chunks."""
    launches: list[bool] = []
    signature = inspect.signature(attend_paged)

    def attend(*args: Any) -> None:
        launches.append(signature.bind(*args).arguments["batch_invariant"])
        attend_paged(*args)

    monkeypatch.setattr(prefill_cuda, "attend_paged", attend)
    model = tiny_llama(
        "cuda",
        dtype=torch.bfloat16,
        head_dim=head_dim,
        max_position_embeddings=2048,
    )
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, ignore_eos=True)
    prompts = [[(7 * i + i // 11 * shift) % 256 for i in range(n)] for n, shift in LONG_PROMPTS]
    options = {"page_size": 16, "max_context": 1400, "max_prefill_tokens": 800}
    small, large = (
        make_engine(model=model, prefill_chunk=chunk, **options) for chunk in (384, 1152)
    )
    alone = [small.generate([prompt], params)[0] for prompt in prompts]
    for engine in (small, large):
        for prompt_ids in (prompts, prompts[::-1]):
            together = engine.generate(prompt_ids, params)
            expected = alone if prompt_ids is prompts else alone[::-1]
            assert [c.token_ids for c in together] == [c.token_ids for c in expected]
    assert launches
    assert all(launches)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torchs_default_device_changes_no_token(scheme: str, device: torch.device) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, repetition_penalty=1.2)
    prompts = ["abc", "a prompt of more than one chunk", "third"]
    model = tiny_llama(device, scheme)
    expected = make_engine(model=model, max_context=48).generate(prompts, params)
    torch.set_default_device("meta" if device.type == "cpu" else device)
    try:
        table = RopeConfig().cos_sin_table(8, 128)
        found = make_engine(model=model, max_context=48).generate(prompts, params)
    finally:
        torch.set_default_device(None)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert table.equal(next(model.attention.tables()).cpu())


def test_an_engine_made_in_inference_mode_works_outside_it() -> None:
    expected = greedy(make_engine(), "abc", 4)
    with torch.inference_mode():
        engine = make_engine()
    assert greedy(engine, "abc", 4) == expected
