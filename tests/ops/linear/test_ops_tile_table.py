"""The choice of W8A8 kernels: the built-in table, and what was tuned on a machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.linear import tile_table, tile_tuning
from ostinato.ops.linear.gemm_variants import GEMM_DTYPES, GemmSmallM, GemmTiled, out_dtypes
from ostinato.ops.linear.tile_table import Choice, choose

GPU, SMS = "NVIDIA H200", 132
TILED = GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=64)
STREAMING = GemmSmallM(out_dtype="bf16", max_m=8)

sizes = st.one_of(
    st.integers(1, 300),
    st.integers(1, 2**31 - 1),
    st.builds(lambda bits, by: max(1, 2**bits + by), st.integers(0, 30), st.integers(-1, 1)),
)
dtypes = st.sampled_from(GEMM_DTYPES).flatmap(
    lambda dtype: st.fixed_dictionaries(
        {"dtype": st.just(dtype), "out_dtype": st.sampled_from(out_dtypes(dtype))}
    )
)
ways = st.fixed_dictionaries(
    {
        "packed": st.booleans(),
        "fast_accum": st.booleans(),
        "batch_invariant": st.booleans(),
    }
)
calls = st.builds(lambda of, how: {**of, **how}, dtypes, ways)


def check_legal(choice: Choice, m: int, n: int, call: dict[str, Any]) -> None:
    variant = choice.variant
    assert variant in CATALOGUE
    assert (variant.dtype, variant.out_dtype) == (call["dtype"], call["out_dtype"])
    if isinstance(variant, GemmSmallM):
        assert call["packed"]
        assert m <= variant.max_m
        assert variant.dtype == "int8" or not call["batch_invariant"]
        return
    assert variant.fast_accum == (call["fast_accum"] and call["dtype"] == "e4m3")
    assert choice.tile_channels % 16 == 0
    assert 0 <= choice.tile_channels <= variant.channels
    assert 0 <= choice.tile_tokens <= variant.tokens
    assert choice.cluster in (0, 1, 2)
    assert choice.split_k in (0, 2)
    assert choice.cluster == 2 or not choice.share_weights
    if call["batch_invariant"] and variant.dtype != "int8":
        assert not choice.split_k
    assert choice.band >= 0


@settings(max_examples=600)
@given(m=sizes, n=sizes, k=sizes, call=calls, sms=st.sampled_from([2, 78, 114, 132]))
def test_every_call_gets_a_legal_choice(
    m: int, n: int, k: int, call: dict[str, Any], sms: int
) -> None:
    choice = choose(m, n, k, **call, sms=sms)
    check_legal(choice, m, n, call)
    if choice.split_k:
        # As csrc/gemm_w8a8/tiled/tile_scheduler.cuh has it.
        assert choice.cluster == 2
        assert not choice.share_weights
        assert choice.variant.tokens >= 32
        assert not choice.variant.pingpong
        tokens = choice.tile_tokens or choice.variant.tokens
        columns = -(-n // (choice.tile_channels or choice.variant.channels))
        left = -(-columns // 2) * -(-m // tokens) % (sms // 2)
        assert 2 * left <= sms // 2


@settings(max_examples=200)
@given(n=st.integers(16, 60_000), m=st.integers(1, 256), k=st.integers(512, 30_000), call=calls)
def test_no_sm_has_much_more_to_do_than_another(
    n: int, m: int, k: int, call: dict[str, Any]
) -> None:
    """The tiles fill their rounds, unless there are too few channels for that."""
    choice = choose(m, n, k, **{**call, "packed": False})
    assert isinstance(choice.variant, GemmTiled)
    groups = math.ceil(n / choice.tile_channels) * math.ceil(m / choice.tile_tokens)
    rounds = math.ceil(groups / SMS)
    assert rounds == 1 or groups / (rounds * SMS) > 0.5


@settings(max_examples=600)
@given(m=st.integers(1, 20_000), n=sizes, k=sizes, call=calls)
def test_tiles_have_few_rows_behind_the_last_token(
    m: int, n: int, k: int, call: dict[str, Any]
) -> None:
    """TMA takes long over those: 257 tokens in tiles of 107 took longer than 512, 33 than 64."""
    choice = choose(m, n, k, **call)
    if isinstance(choice.variant, GemmTiled) and choice.tile_tokens:
        tiles = math.ceil(m / choice.tile_tokens)
        # Chunks that TMA stores whole.
        step = 1 if choice.variant.token_rows else 32 if choice.variant.tokens % 64 == 0 else 16
        assert tiles * choice.tile_tokens - m < tiles * step
        # Of a pair neither tile is without any, if there are even tiles of an even number.
        can_be_even = math.ceil(m / math.ceil(m / (tiles + 1))) == tiles + 1
        assert not (choice.share_weights and tiles % 2 and step == 1 and can_be_even)


@given(st.integers(1, 40_000))
def test_the_model_is_asked_for_few_more_tokens_than_there_are(m: int) -> None:
    modelled = tile_table.modelled_m(m)
    assert modelled == 16384 if m > 16384 else m <= modelled <= max(m + 15, 1.25 * m)
    assert modelled in tile_table.largest_ms()
    if m <= 1024:
        assert [math.ceil(m / t) for t in (64, 128)] == [math.ceil(modelled / t) for t in (64, 128)]


@settings(max_examples=100)
@given(n=st.integers(1, 100_000), m=sizes, call=calls)
def test_the_kernels_of_a_weight_are_known_beforehand(n: int, m: int, call: dict[str, Any]) -> None:
    del call["packed"]
    known = tile_tuning.variants("", SMS, n, 4096, **call)
    assert choose(m, n, 4096, packed=True, **call).variant in known


def test_the_table_gives_reasons() -> None:
    assert all(row.reason for row in tile_table.TABLE)


@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_sizes_begin_at_one(name: str) -> None:
    sizes = {"m": 1, "n": 1, "k": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: got 0, expected at least 1"):
        choose(**sizes, dtype="int8", out_dtype="bf16", packed=True)


def test_examples_of_the_table() -> None:
    def chosen(m: int, n: int, **options: Any) -> str:
        options = {"dtype": "e4m3", "out_dtype": "bf16", "packed": True, **options}
        choice = choose(m, n, 4096, **options)
        return f"{choice.variant.name} {choice.tile_channels}"

    assert chosen(8, 28672, dtype="int8") == "gemm_small_m-int8-bf16-m8-w1r2x4 0"
    assert chosen(9, 6144, dtype="int8") == "gemm_small_m-int8-bf16-m16-w1r3x4 0"
    assert chosen(9, 4096, dtype="int8") == "gemm_small_m-int8-bf16-m16-w1r2x4 0"
    assert chosen(9, 28672, dtype="int8") == "gemm_tiled-int8-bf16-128x32 112"
    assert chosen(9, 28672) == "gemm_tiled-e4m3-bf16-128x16-fast_accum 112"
    assert chosen(8, 6144, batch_invariant=True) == "gemm_tiled-e4m3-bf16-64x8-fast_accum 64"
    assert chosen(9, 6144, batch_invariant=True) == "gemm_tiled-e4m3-bf16-64x16-fast_accum 64"
    assert chosen(8, 4096, packed=False, dtype="int8") == "gemm_tiled-int8-bf16-64x16 64"
    assert chosen(128, 6144) == "gemm_tiled-e4m3-bf16-96x64-fast_accum 96"
    assert chosen(256, 6144) == "gemm_tiled-e4m3-bf16-96x128-fast_accum 96"
    assert chosen(70, 4096, fast_accum=False) == "gemm_tiled-e4m3-bf16-64x64 64"
    assert chosen(4096, 4096) == "gemm_tiled-e4m3-bf16-128x256-fast_accum 128"


_SPLIT = [row for row in tile_table.MEASURED if not row.share_weights]
_SHARED = [row for row in tile_table.MEASURED if row.share_weights]


@pytest.mark.parametrize("row", _SPLIT, ids=str)
def test_a_measured_split_of_k_is_taken_where_sums_may_have_any_order(
    row: tile_table.Measured,
) -> None:
    def chosen(m: int, dtype: str, batch_invariant: bool = False, sms: int = 132) -> Choice:
        options = {"packed": True, "batch_invariant": batch_invariant, "sms": sms}
        return choose(m, row.n, row.k, dtype, "bf16", **options)

    for dtype in ("int8", "e4m3"):
        own = dtype in row.dtypes
        wanted = row.choice(dtype, "bf16")
        for m in (row.m[0], row.m[-1]):
            choice = chosen(m, dtype)
            assert (replace(choice, tile_tokens=row.tokens) == wanted) == own
            assert math.ceil(m / choice.tile_tokens) == math.ceil(m / row.tokens) or not own
            assert tile_table.serving(choice, m, row.n, True, True, False, 132) == choice
        # Elsewhere the model decides, and not the row without its split.
        others = [chosen(m, dtype) for m in (row.m[0] - 1, row.m[-1] + 1)]
        others.append(chosen(row.m[-1], dtype, sms=108))
        if dtype == "e4m3":
            others.append(chosen(row.m[-1], dtype, batch_invariant=True))
        for other in others:
            assert replace(other, tile_tokens=row.tokens) != wanted


@pytest.mark.parametrize("row", _SHARED, ids=str)
def test_a_measured_row_of_16_bits_keeps_k_whole(row: tile_table.Measured) -> None:
    how: dict[str, Any] = {"packed": True, "fast_accum": False, "batch_invariant": True}

    def chosen(m: int, dtype: str, out_dtype: str, **more: Any) -> Choice:
        return choose(m, row.n, row.k, dtype, out_dtype, **{**how, **more})

    for dtype in GEMM_DTYPES:
        wanted = row.choice(dtype, out_dtypes(dtype)[0])
        for m in (row.m[0], row.m[-1]):
            choice = chosen(m, dtype, out_dtypes(dtype)[0])
            assert (replace(choice, tile_tokens=row.tokens) == wanted) == (dtype in row.dtypes)
            assert not choice.split_k
    wanted = row.choice("bf16", "fp32")
    assert chosen(row.m[-1], "bf16", "fp32") == wanted
    others = [chosen(m, "bf16", "fp32") for m in (row.m[0] - 1, row.m[-1] + 1)]
    for other in (*others, chosen(row.m[-1], "bf16", "fp32", sms=114)):
        assert replace(other, tile_tokens=row.tokens) != wanted


@pytest.mark.parametrize("m", [1, 8, 16])
def test_few_tokens_share_no_k_unless_sms_would_have_no_weights(m: int) -> None:
    for dtype in ("int8", "e4m3"):
        options = {"dtype": dtype, "out_dtype": "bf16", "packed": dtype == "e4m3"}
        assert choose(m, 4096, 14_336, **options).split_k <= 1
        assert choose(m, 16 * SMS, 8192, **options).split_k <= 1
    assert choose(m, 1024, 16_384, **options).split_k == 2


@pytest.mark.parametrize("m", [17, 32, 33, 48])
@pytest.mark.parametrize("n", [6144, 10_240, 28_672])
def test_the_tokens_of_small_tiles_are_not_shared(m: int, n: int) -> None:
    choice = choose(m, n, 4096, "int8", "bf16", packed=True)
    assert choice.cluster == 1 or choice.share_weights or choice.split_k


# Tuned choices.


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give an empty kernel cache's own file of tuned rows, not written yet."""
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    monkeypatch.delenv(tile_tuning.VARIABLE, raising=False)
    tile_tuning.override(None)
    yield tile_tuning.tuning_path()
    monkeypatch.undo()
    tile_tuning.override(None)


def row(m_max: int, using: GemmSmallM | GemmTiled = TILED, **changes: Any) -> dict[str, Any]:
    size = {"dtype": using.dtype, "n": 512, "k": 1024, "m_max": m_max}
    return {**size, "variant": using.name, **changes}


def write(path: Path, *rows: Any, **changes: Any) -> None:
    document = {"gpu": GPU, "source": tile_tuning.sources_hash(), "rows": rows, **changes}
    path.write_text(json.dumps(document))


def picked(m: int, n: int = 512, k: int = 1024, **changes: Any) -> Choice:
    call = {"dtype": "int8", "out_dtype": "bf16", "packed": True, "fast_accum": True}
    call = {**call, "batch_invariant": False, **changes}
    return tile_tuning.choose(GPU, SMS, m, n, k, *call.values())


def built_in(m: int, n: int = 512, k: int = 1024, **changes: Any) -> Choice:
    return choose(m, n, k, **{"dtype": "int8", "out_dtype": "bf16", "packed": True, **changes})


def test_rows_hold_for_their_size_and_up_to_their_m(tuned: Path) -> None:
    write(tuned, row(64, tile_channels=48, cluster=2, band=3), row(8, STREAMING))
    assert picked(8) == Choice(STREAMING)
    assert picked(9) == picked(64) == Choice(TILED, tile_channels=48, cluster=2, band=3)
    assert picked(65) == built_in(65)
    assert picked(9, n=513) == built_in(9, n=513)
    assert picked(9, k=1023) == built_in(9, k=1023)
    assert picked(9, dtype="e4m3") == built_in(9, dtype="e4m3")
    assert picked(9, out_dtype="fp32").variant.out_dtype == "fp32"


def test_a_row_for_bf16_holds_with_k_in_one_order(tuned: Path) -> None:
    wide = GemmTiled(dtype="bf16", out_dtype="bf16", channels=128, tokens=64)
    write(tuned, row(64, wide, tile_channels=48, cluster=2, split_k=2))
    how = {"dtype": "bf16", "fast_accum": False, "batch_invariant": True}
    assert picked(9, **how) == Choice(wide, tile_channels=48, cluster=2)
    assert picked(9, **how, out_dtype="fp32").variant.out_dtype == "fp32"
    assert picked(9, **{**how, "dtype": "fp16"}, out_dtype="fp16").variant.dtype == "fp16"


def test_rows_do_not_hold_below_the_least_m_that_was_timed(tuned: Path) -> None:
    write(tuned, row(64, m_min=33, tile_channels=48), row(300, m_min=300, tile_channels=16))
    assert picked(33).tile_channels == picked(64).tile_channels == 48
    assert picked(300).tile_channels == 16
    for m in (1, 32, 65, 299, 301):
        assert picked(m) == built_in(m)


@pytest.mark.parametrize("m_min", [1, 2, 100, 256])
def test_the_kernels_below_a_row_are_known_beforehand(tuned: Path, m_min: int) -> None:
    write(tuned, row(256, m_min=m_min, n=6144))
    flags = {"fast_accum": True, "batch_invariant": False}
    known = tile_tuning.variants(GPU, SMS, 6144, 1024, "int8", "bf16", **flags)
    assert {picked(m, n=6144).variant for m in range(1, 400)} <= set(known)


def test_rows_that_may_not_serve_a_call_are_passed_over(tuned: Path) -> None:
    fast = GemmTiled(dtype="e4m3", out_dtype="bf16", channels=128, tokens=64, fast_accum=True)
    exact = GemmTiled(dtype="e4m3", out_dtype="bf16", channels=64, tokens=64)
    write(tuned, row(8, STREAMING), row(64), row(64, exact), row(63, fast))
    assert picked(5).variant == STREAMING
    assert picked(5, packed=False).variant == TILED
    call = {"dtype": "e4m3"}
    assert picked(5, **call).variant == picked(5, **call, packed=False).variant == fast
    assert picked(5, **call, fast_accum=False).variant == exact
    assert picked(64, **call) == built_in(64, **call)
    known = tile_tuning.variants(
        GPU, SMS, 512, 1024, "e4m3", "bf16", fast_accum=True, batch_invariant=False
    )
    assert fast in known
    assert exact not in known


def test_k_is_split_where_that_is_possible(tuned: Path) -> None:
    fast = GemmTiled(dtype="e4m3", out_dtype="bf16", channels=128, tokens=64, fast_accum=True)
    split = {"cluster": 2, "split_k": 2}
    write(tuned, row(128, **split), row(128, fast, **split), row(128, n=10240, **split))
    # Two groups of two tiles, and later 40, for 66 clusters.
    assert picked(64).split_k == picked(64, dtype="e4m3").split_k == 2
    assert picked(64, batch_invariant=True).split_k == 2
    assert picked(64, n=10240) == Choice(TILED, cluster=2)
    assert picked(64, dtype="e4m3", batch_invariant=True) == Choice(fast, cluster=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "NVIDIA H100"}, f"measured on another GPU (NVIDIA H100; this one is {GPU})"),
        ({"source": "0" * 16}, f"measured on another source ({'0' * 16}; this one is "),
    ],
)
def test_rows_of_another_machine_are_ignored_aloud(
    tuned: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], said: str
) -> None:
    write(tuned, row(64, variant="of another time"), **changes)
    assert picked(9) == built_in(9)
    assert picked(10) == built_in(10)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ostinato: {tuned}: ignored: {said}")


def test_the_environment_and_the_caller_name_other_files(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tuned, row(64, tile_channels=16))
    named, given = tmp_path / "named.json", tmp_path / "given.json"
    write(named, row(64, tile_channels=32))
    write(given, row(64, tile_channels=64))
    assert picked(9).tile_channels == 16
    monkeypatch.setenv(tile_tuning.VARIABLE, str(named))
    tile_tuning.forget()
    assert picked(9).tile_channels == 32
    tile_tuning.override(given)
    assert picked(9).tile_channels == 64
    tile_tuning.override(None)
    assert picked(9).tile_channels == 32


def test_a_named_file_must_exist(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert picked(9) == built_in(9)
    with pytest.raises(FileNotFoundError):
        tile_tuning.override(tuned.parent / "absent.json")
    monkeypatch.setenv(tile_tuning.VARIABLE, str(tuned.parent / "absent.json"))
    tile_tuning.forget()
    with pytest.raises(FileNotFoundError):
        picked(9)


def test_without_a_gpu_nothing_is_tuned(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tuned, row(64))
    assert tile_tuning.tuning_for("") == {}
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([1], r"rows\[0\]: got int, expected an object"),
        ([row(64), {}], r"rows\[1\]: got \[\], expected \['dtype', 'k', "),
        ([row(64, tiles=1)], r"rows\[0\]: got .*'tiles'.*, expected"),
        ([row(64, dtype="int4")], "dtype: got 'int4', expected int8 or e4m3 or bf16 or fp16"),
        ([row(64, variant="gemm")], "variant: got 'gemm', expected a compiled GEMM of int8"),
        ([row(64, dtype="e4m3")], "variant: got 'gemm_tiled-int8-bf16-128x64', expected"),
        ([row(64, variant=["a"])], r"rows\[0\]: "),
        ([row(0)], "m_max: got 0, expected an integer in 1"),
        ([row(8, m_min=0)], r"m_min: got 0, expected an integer in 1\.\.8"),
        ([row(8, m_min=9)], r"m_min: got 9, expected an integer in 1\.\.8"),
        ([row(9, STREAMING)], r"m_max: got 9, expected an integer in 1\.\.8"),
        ([row(64, n=True)], "n: got True, expected an integer"),
        ([row(64, k="1")], "k: got '1', expected an integer"),
        ([row(64, tile_channels=144)], r"tile_channels: got 144, expected an integer in 0\.\.128"),
        ([row(64, share_weights=1)], "share_weights: got 1 with cluster 0, expected cluster 2"),
        ([row(64, tile_channels=24)], "tile_channels: got 24, expected a multiple of 16"),
        ([row(64, tile_tokens=65)], r"tile_tokens: got 65, expected an integer in 0\.\.64"),
        ([row(64, cluster=3)], r"cluster: got 3, expected an integer in 0\.\.2"),
        ([row(64, split_k=2)], "split_k: got 2 with cluster 0, expected cluster 2"),
        ([row(64, band=-1)], "band: got -1"),
        ([row(8, STREAMING, band=1)], r"band: got 1, expected an integer in 0\.\.0"),
    ],
)
def test_malformed_rows(tuned: Path, rows: list[Any], match: str) -> None:
    write(tuned, *rows)
    with pytest.raises(ValueError, match=f"{tuned}: .*{match}"):
        picked(9)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[]", "got list, expected an object"),
        ('{"gpu": 1}', "gpu: got int, expected str"),
        ('{"gpu": "", "source": "", "rows": {}}', "rows: got dict, expected list"),
    ],
)
def test_malformed_files(tuned: Path, text: str, match: str) -> None:
    tuned.write_text(text)
    with pytest.raises(ValueError, match=match):
        picked(9)
    with pytest.raises(ValueError, match=match):
        tile_tuning.override(tuned)
