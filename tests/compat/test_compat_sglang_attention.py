"""The attention backend in SGLang, with SGLang's own pools, batches and layers."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import plugins
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_classes import DIM, HEADS, KV_HEADS, runner

from ostinato.compat import sglang as plugin
from ostinato.compat.sglang.attention import OstinatoBackend, check_kernels

plugin.register()

ROOT = Path(__file__).parents[2]
BEFORE = (0, 21, 5)  # tokens of each request in the pool
NEW = (7, 1, 12)  # tokens of a prompt's part
ROWS = (2, 4, 1)  # of the requests' table


def slots_of(backend_runner: Any, row: int, length: int) -> torch.Tensor:
    """Give a request so many slots, whose pages are all over the pool, and return them."""
    size = backend_runner.page_size
    pages = -(-length // size)
    chosen = torch.randperm(20 * 16 // size - 1)[:pages] + 1
    while any(set(chosen.tolist()) & set(taken) for taken in backend_runner.taken.values()):
        chosen = torch.randperm(20 * 16 // size - 1)[:pages] + 1
    backend_runner.taken[row] = chosen.tolist()
    slots = (chosen[:, None] * size + torch.arange(size)).flatten()[:length]
    backend_runner.req_to_token_pool.write((row, slice(0, length)), slots.to(torch.int32))
    return slots


def batch_of(mode: ForwardMode, lengths: list[int], new: list[int], where: torch.Tensor) -> Any:
    extend = (
        {}
        if mode.is_decode()
        else {
            "extend_seq_lens": torch.tensor(new, dtype=torch.int32),
            "extend_seq_lens_cpu": new,
            "extend_prefix_lens_cpu": [length - n for length, n in zip(lengths, new, strict=True)],
        }
    )
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(lengths),
        input_ids=torch.zeros(sum(new), dtype=torch.int64),
        req_pool_indices=torch.tensor(ROWS),
        seq_lens=torch.tensor(lengths),
        out_cache_loc=where,
        seq_lens_sum=sum(lengths),
        **extend,
    )


def expected(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any, sinks: Any = None
) -> torch.Tensor:
    """Return attention of the last queries [T, heads, dim] to all keys, in fp64."""
    tokens, length = q.size(0), keys.size(0)
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scaling
    if layer.logit_cap > 0:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    at, key = torch.arange(length - tokens, length)[:, None], torch.arange(length)
    hidden = key > at
    if layer.sliding_window_size >= 0:
        hidden = hidden | (key < at - layer.sliding_window_size)
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        more = sinks.double()[:, None, None].expand(-1, tokens, 1)
        logits = torch.cat([logits, more], dim=2)
    weights = logits.softmax(2)[:, :, :length]
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@pytest.mark.parametrize("options", [{}, {"sliding_window_size": 4}, {"logit_cap": 3.0}], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_prompts_and_steps_through_the_pool(
    dtype: torch.dtype, page_size: int, options: dict[str, Any]
) -> None:
    held = runner(page_size, dtype)
    held.taken = {}
    backend = ATTENTION_BACKENDS[plugin.NAME](held)
    assert isinstance(backend, AttentionBackend)
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer_id=1, **options)
    if dtype is torch.float8_e4m3fn:
        layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
    slots = [
        slots_of(held, row, before + new + 1)
        for row, before, new in zip(ROWS, BEFORE, NEW, strict=True)
    ]
    tokens = [[torch.randn(len(s), h, DIM).bfloat16() for h in (KV_HEADS, KV_HEADS)] for s in slots]

    def run(mode: ForwardMode, first: list[int], count: list[int]) -> None:
        """Attend with each request's tokens from `first` on, and compare."""
        parts = [slice(f, f + c) for f, c in zip(first, count, strict=True)]
        where = torch.cat([s[part] for s, part in zip(slots, parts, strict=True)])
        k, v = (torch.cat([t[i][p] for t, p in zip(tokens, parts, strict=True)]) for i in range(2))
        q = torch.randn(sum(count), HEADS * DIM).bfloat16()
        batch = batch_of(mode, [p.stop for p in parts], count, where)
        backend.init_forward_metadata(batch)
        out = backend.forward(q, k.clone(), v.clone(), layer, batch)
        assert out.shape == q.shape
        pool = held.token_to_kv_pool.get_kv_buffer(1)
        factors = (layer.k_scale, layer.v_scale) if pool[0].itemsize == 1 else (1.0, 1.0)
        for ours, queries, own, part in zip(
            out.split(count), q.split(count), slots, parts, strict=True
        ):
            keys, values = (
                x[own[: part.stop]].float() * f for x, f in zip(pool, factors, strict=True)
            )
            want = expected(queries.view(-1, HEADS, DIM), keys, values, layer)
            torch.testing.assert_close(ours.double(), want, rtol=0.02, atol=0.02)

    run(ForwardMode.EXTEND, [0, 0, 0], [max(b, 1) for b in BEFORE])
    run(ForwardMode.EXTEND, list(BEFORE), list(NEW))
    run(ForwardMode.DECODE, [b + n for b, n in zip(BEFORE, NEW, strict=True)], [1, 1, 1])


def test_a_captured_step_reads_its_own_memory() -> None:
    """What a graph freezes are addresses: lengths and tables are written by recorded kernels."""
    held = runner(16)
    held.taken = {}
    backend = OstinatoBackend(held)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8)
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer_id=0)
    slots = [slots_of(held, row, 40) for row in ROWS]
    for own in slots:
        k, v = (torch.randn(40, KV_HEADS, DIM).bfloat16() for _ in range(2))
        held.token_to_kv_pool.set_kv_buffer(layer, own, k, v)
    q = torch.randn(3, HEADS * DIM).bfloat16()
    addresses = set()
    for lengths in ([3, 40, 17], [40, 1, 33]):
        where = torch.stack([own[n - 1] for own, n in zip(slots, lengths, strict=True)])
        batch = batch_of(ForwardMode.DECODE, lengths, [1, 1, 1], where)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        metadata = backend.forward_metadata
        addresses.add((metadata.seq_lens.data_ptr(), metadata.page_table.data_ptr()))
        replayed = backend.forward_decode(q, None, None, layer, batch)
        backend.init_forward_metadata(batch)
        assert torch.equal(replayed, backend.forward_decode(q, None, None, layer, batch))
    assert len(addresses) == 1
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    extend = batch_of(ForwardMode.EXTEND, [3, 3, 3], [1, 1, 1], where)
    with pytest.raises(ValueError, match="forward_mode: got EXTEND in a graph"):
        backend.init_forward_metadata_out_graph(extend)


def test_sinks_are_one_more_logit() -> None:
    held = runner(16)
    held.taken = {}
    backend = OstinatoBackend(held)
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer_id=0)
    slots = [slots_of(held, row, 9) for row in ROWS]
    for own in slots:
        k, v = (torch.randn(9, KV_HEADS, DIM).bfloat16() for _ in range(2))
        held.token_to_kv_pool.set_kv_buffer(layer, own, k, v)
    sinks, q = torch.randn(HEADS).bfloat16(), torch.randn(3, HEADS * DIM).bfloat16()
    batch = batch_of(ForwardMode.DECODE, [9, 4, 1], [1, 1, 1], torch.zeros(3, dtype=torch.int64))
    backend.init_forward_metadata(batch)
    out = backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False, sinks=sinks)
    for ours, query, own, n in zip(out, q, slots, (9, 4, 1), strict=True):
        keys, values = (x[own[:n]] for x in held.token_to_kv_pool.get_kv_buffer(0))
        want = expected(query.view(1, HEADS, DIM), keys, values, layer, sinks)
        torch.testing.assert_close(ours.double()[None], want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "speculative-algorithm"),
        ({"use_mla_backend": True}, "model: got multi-head latent attention"),
        ({"is_hybrid_swa": True}, "model: got a pool of its own for sliding windows"),
        ({"token_to_kv_pool": SimpleNamespace(kv_cache_layout="hnd")}, "KV cache: got layout hnd"),
        (
            {"token_to_kv_pool": SimpleNamespace(dtype=torch.float8_e5m2)},
            "kv-cache-dtype: got torch.float8_e5m2, expected one of bfloat16",
        ),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "dcp-size: got 2, expected 1 with backend"),
        (
            {"server_args": SimpleNamespace(enable_pdmux=True)},
            "enable-pdmux: got True, expected False with backend",
        ),
        (
            {"server_args": SimpleNamespace(enable_prefill_cp=True)},
            "enable-prefill-cp: got True, expected False",
        ),
        (
            {"model_config": SimpleNamespace(is_encoder_decoder=True)},
            "model: got an encoder and a decoder",
        ),
    ],
)
def test_what_the_backend_does_not_have_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OstinatoBackend(runner(16, **changes))


@pytest.mark.parametrize(
    ("capability", "heads", "words"),
    [
        ((8, 0), {}, "device: got sm_80, expected a Hopper GPU"),
        ((9, 0), {"head_dim": 72}, "model: got heads of 72 and 72 elements, 4 of queries"),
        ((9, 0), {"v_head_dim": 64}, "model: got heads of 128 and 64 elements"),
        ((9, 0), {"num_attention_heads": 800}, "100 of queries for one of keys"),
        ((9, 0), {"dtype": torch.float32}, "in torch.float32, for which backend ostinato has no"),
    ],
)
def test_gpus_and_heads_without_kernels_are_refused(
    capability: tuple[int, int], heads: dict[str, Any], words: str
) -> None:
    config = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"dtype": torch.bfloat16}
    check_kernels((9, 0), SimpleNamespace(**config))
    with pytest.raises(ValueError, match=words):
        check_kernels(capability, SimpleNamespace(**{**config, **heads}))


def test_models_and_other_backends_find_the_pools() -> None:
    held = runner(16)
    backend = OstinatoBackend(held)
    TboAttnBackend(backend, [backend, backend])
    with forward_context(ForwardContext(attn_backend=backend)):
        assert get_token_to_kv_pool() is held.token_to_kv_pool
        assert get_req_to_token_pool() is held.req_to_token_pool


def test_what_a_layer_asks_for_in_vain_is_named() -> None:
    held = runner(16)
    held.taken = {}
    backend = OstinatoBackend(held)
    q = torch.randn(3, HEADS * DIM).bfloat16()
    batch = batch_of(ForwardMode.DECODE, [1, 1, 1], [1, 1, 1], torch.zeros(3, dtype=torch.int64))
    backend.init_forward_metadata(batch)
    for attribute, value, words in (
        ("is_cross_attention", True, "layer: got cross attention"),
        ("attn_type", None, "attn_type: got None, expected DECODER"),
        ("xai_temperature_len", 7, "xai_temperature_len: got 7, expected none"),
        ("logit_capping_method", "rational", "logit_capping_method: got 'rational'"),
    ):
        layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer_id=0, logit_cap=1.0)
        setattr(layer, attribute, value)
        with pytest.raises(ValueError, match=words):
            backend.forward_decode(q, None, None, layer, batch)
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer_id=0)
    with pytest.raises(ValueError, match="q_rope: got a value, expected None"):
        backend.forward_decode(q, None, None, layer, batch, q_rope=q)
    with pytest.raises(ValueError, match="forward_mode: got TARGET_VERIFY"):
        backend.init_forward_metadata(batch_of(ForwardMode.TARGET_VERIFY, [1] * 3, [1] * 3, q))


def test_registering_twice_offers_the_backend_once() -> None:
    before = choices.ATTENTION_BACKEND_CHOICES.count(plugin.NAME)
    plugin.register()
    plugin.register()
    assert choices.ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == max(before, 1) == 1
    assert plugin.NAME in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert not torch.cuda.is_initialized()
    assert any("w8a8_int8" in target for target in HookRegistry._hooks)


def test_a_version_without_an_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_done", [])
    monkeypatch.delattr(choices, "add_attention_backend_choices")
    with pytest.raises(RuntimeError, match=r"sglang: got 0\.5\.23, expected 0\.5\.23: .*add_att"):
        plugin.register()


def test_sglang_finds_the_plug_in_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((group, found),) = (
        (group, names)
        for group, names in project["entry-points"].items()
        if group == plugins.GENERAL_PLUGINS_GROUP
    )
    points = [EntryPoint(name, value, group) for name, value in found.items()]
    called: list[int] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(plugin, "register", lambda: called.append(1))
    plugins.load_plugins()
    assert called == [1]
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()
    assert called == [1]


def test_decoding_alone_beside_another_backend() -> None:
    """Prompts by SGLang's backend on torch, steps by ours: as SGLang's own steps."""
    held = runner(16)
    held.taken, held.device = {}, "cpu"
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer_id=1)
    theirs, ours = TorchNativeAttnBackend(held), OstinatoBackend(held)
    lengths = [23, 1, 40]
    slots = [slots_of(held, row, n + 1) for row, n in zip(ROWS, lengths, strict=True)]

    def random(count: int) -> list[torch.Tensor]:
        shapes = ((HEADS * DIM,), (KV_HEADS, DIM), (KV_HEADS, DIM))
        return [torch.randn(count, *shape).bfloat16() for shape in shapes]

    where = torch.cat([own[:n] for own, n in zip(slots, lengths, strict=True)])
    prompt = batch_of(ForwardMode.EXTEND, lengths, lengths, where)
    prompt.extend_prefix_lens = torch.zeros(3, dtype=torch.int64)
    theirs.init_forward_metadata(prompt)
    theirs.forward_extend(*random(sum(lengths)), layer, prompt)
    where = torch.stack([own[-1] for own in slots])
    step = batch_of(ForwardMode.DECODE, [n + 1 for n in lengths], [1, 1, 1], where)
    qkv = random(3)
    results = []
    for backend in (theirs, ours):
        backend.init_forward_metadata(step)
        results.append(backend.forward_decode(*(x.clone() for x in qkv), layer, step))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
