"""`bench step`: its table, its document, and how it counts work."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_adapters import ADAPTERS

from ostinato.bench.harness.peers import adapter_folder, adapter_named
from ostinato.bench.report import Report, Row
from ostinato.bench.shapes import PRECISIONS, SHAPES
from ostinato.bench.step.breakdown import Span
from ostinato.bench.step.roofline import Roofline, kernel_rooflines, roofline_of
from ostinato.bench.step.run import StepPlan, StepResult, time_steps
from ostinato.bench.step.work import kv_bytes, step_flops, weight_bytes
from ostinato.bench.timing import percentile, time_calls
from ostinato.bench.weights import precision, random_decoder
from ostinato.cli.main import main
from ostinato.models import PagedKVCache, W8A8Linear, kv_format, read_config

TINY = read_config(SHAPES["tiny"])
CPU = torch.device("cpu")
peers = adapter_named("hugging_face.py", adapter_folder(ADAPTERS, {}))


def test_shapes_are_measured_in_every_precision(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    sizes = "--batch 2 1 --context 16 5 --repeats 10 --dtype int8 fp8 bf16"
    flags = ["--json", str(file), "--device", str(device)]
    assert main(["bench", "step", "--shape", "tiny", *sizes.split(), *flags]) == 0
    document = json.loads(file.read_text())
    assert list(document) == ["gpu", "versions", "commit", "rows"]
    assert document["gpu"]
    assert torch.__version__.startswith(document["versions"]["torch"])
    assert [(row["case"], row["impl"]) for row in document["rows"]] == [
        (f"tiny b{batch} ctx{context}", f"ostinato_{dtype}")
        for dtype in ("int8", "fp8", "bf16")
        for context in (5, 16)
        for batch in (1, 2)
    ]
    for row in document["rows"]:
        assert list(row) == ["section", "case", "impl", "us", "tb_s", "tflop_s", "floor_us"]
        assert row["section"] == "step"
        if device.type == "cpu":
            assert row["floor_us"] is None
        assert min(row["us"], row["tb_s"], row["tflop_s"]) > 0
    printed = capsys.readouterr().out
    assert printed.startswith(document["gpu"])
    assert all(row["case"] in printed for row in document["rows"])


def test_batches_are_timed_beside_padding_too(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    flags = ["--shape", "tiny-moe", "--batch", "3", "2", "--context", "5", "--repeats", "10"]
    flags += ["--device", str(device), "--padded"]
    assert main(["bench", "step", *flags, "4", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        *("tiny-moe b2 ctx5", "tiny-moe b3 ctx5"),
        *("tiny-moe b2 ctx5 in4", "tiny-moe b3 ctx5 in4"),
    ]
    for exact, padded in zip(rows[:2], rows[2:], strict=True):
        # The same work, whatever time it takes.
        assert exact["tb_s"] * exact["us"] == pytest.approx(padded["tb_s"] * padded["us"], rel=0.01)
    assert main(["bench", "step", *flags, "3"]) == 2
    assert "padded: got 3, expected more than 3, the batch" in capsys.readouterr().err


def test_a_peer_decodes_the_same_cases(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    sizes = "--batch 1 2 --context 8 5 --repeats 10 --dtype bf16 --peer transformers"
    flags = ["--json", str(file), "--device", str(device)]
    assert main(["bench", "step", "--shape", "tiny", *sizes.split(), *flags]) == 0
    rows = json.loads(file.read_text())["rows"]
    ours, theirs = rows[:4], rows[4:]
    assert {row["impl"] for row in theirs} == {"transformers_bf16"}
    assert [row["case"] for row in theirs] == [row["case"] for row in ours]
    for row, other in zip(ours, theirs, strict=True):
        # The same work: weights, keys and values, and operations.
        assert row["tb_s"] * row["us"] == pytest.approx(other["tb_s"] * other["us"], rel=0.01)
        assert row["tflop_s"] * row["us"] == pytest.approx(other["tflop_s"] * other["us"], rel=0.01)
        assert row["peer"] == "transformers_bf16"
        assert row["ratio"] == pytest.approx(row["us"] / other["us"], rel=1e-3)
        assert "peer" not in other
    assert capsys.readouterr().out.count("transformers_bf16") == 4


@pytest.mark.gpu
def test_a_compiled_peer_is_timed_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--batch 1 --context 8 --repeats 10 --dtype bf16 --peer transformers_compiled"
    assert main(["bench", "step", "--shape", "tiny", *flags.split()]) == 0
    assert "transformers_compiled" in capsys.readouterr().out


def test_what_a_peer_cannot_do_is_said_and_costs_no_other_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = peers._step

    def step(model: object, forward: object, batch: int, *rest: Any) -> object:
        if batch == 1:
            raise torch.OutOfMemoryError("out of memory\nand more")
        return real(model, forward, batch, *rest)

    monkeypatch.setattr(peers, "_step", step)
    plan = StepPlan([1, 2], [8], repeats=10)
    results = list(peers.time_peers(["transformers"], "tiny", CPU, plan))
    assert results[0] == "tiny b1 ctx8 transformers: out of memory"
    assert isinstance(results[1], StepResult)
    assert results[1].batch == 2


def test_what_is_not_as_a_checkpoint_says_is_named(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    flags = "--lm-head fp8 --no-batch-invariant --temperature 0.7 --repeats 10 --context 5"
    argv = ["bench", "step", "--shape", "tiny", *flags.split(), "--json", str(file)]
    assert main([*argv, "--device", "cpu"]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["impl"] == "ostinato_int8_lm_head_fp8_batch_variant"


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ("bf16 fp8 int8", ["", "_fp8kv_token", "_int8kv_token"]),
        ("fp8 --kv-scales static", ["_fp8kv"]),
        ("fp8 auto --kv-scales static token", ["_fp8kv", "_fp8kv_token", ""]),
    ],
)
def test_kv_caches_are_measured_one_after_the_other(
    caches: str,
    expected: list[str],
    tmp_path: Path,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "step.json"
    flags = ["--context", "5", "--repeats", "10", "--kv-cache-dtype", *caches.split()]
    argv = ["bench", "step", "--shape", "tiny", *flags, "--json", str(file)]
    assert main([*argv, "--device", str(device)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["impl"] for row in rows] == [f"ostinato_int8{cache}" for cache in expected]
    usual = {row["impl"]: row["us"] for row in rows}.get("ostinato_int8")
    for row in rows:
        if usual is None or row["impl"] == "ostinato_int8":
            assert "peer" not in row
        else:
            assert row["peer"] == "ostinato_int8"
            assert row["ratio"] == pytest.approx(row["us"] / usual, rel=1e-3)
    # Those that were timed after the 16 bits.
    printed = 2 if expected[0] == "" else 0
    assert capsys.readouterr().out.count(" of ostinato_int8\n") == printed


def test_a_checkpoint_is_measured_under_its_own_name(
    checkpoint: Path, tmp_path: Path, device: torch.device
) -> None:
    file = tmp_path / "step.json"
    flags = ["--repeats", "10", "--context", "8", "--json", str(file), "--device", str(device)]
    assert main(["bench", "step", "--model", str(checkpoint), *flags]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert (row["case"], row["impl"]) == ("random-llama b1 ctx8", "ostinato_fp32")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "one of the arguments --model --shape is required"),
        ("--shape tiny --model x", "argument --model: not allowed with argument --shape"),
        ("--shape giant", "argument --shape: invalid choice: 'giant'"),
        ("--shape tiny --dtype int4", "argument --dtype: invalid choice: 'int4'"),
        ("--model x --dtype int8", "--dtype goes with --shape"),
        ("--model no-such-folder", "--model: got 'no-such-folder', which does not"),
        ("--shape tiny --batch 0", "batch: got 0, expected at least 1"),
        ("--shape tiny --kv-cache-dtype fp4", "argument --kv-cache-dtype: invalid choice: 'fp4'"),
        ("--shape tiny --kv-cache-dtype fp16", "kv_cache_dtype: got 'fp16', expected 'auto', 'fp"),
        ("--shape tiny --kv-scales token", "kv_scales: got 'token', expected None for pages of"),
        (
            "--shape tiny --kv-cache-dtype int8 --kv-scales static",
            "kv_scales: got 'static', but the checkpoint has no scales of an INT8 cache",
        ),
        ("--shape tiny --context 0", "context: got 0, expected at least 1"),
        ("--shape tiny --context 2049", "context: got 2049, expected at most the model's 2048"),
        ("--shape tiny --page-size 0", "page_size: got 0, expected at least 1"),
        ("--shape tiny --repeats 9", "repeats: got 9, expected at least 10"),
        ("--shape tiny --json no-such-folder/f.json", "--json: no-such-folder is not a folder"),
        ("--shape tiny --temperature -1", "temperature: got -1.0, expected at least 0"),
        ("--shape tiny --breakdown --device cpu", "--breakdown: got device cpu"),
        ("--shape tiny --timeline . --device cpu", "--timeline: got device cpu"),
        ("--shape tiny --timeline no-such-folder", "--timeline: no-such-folder is not a folder"),
        ("--model x --lm-head bf16", "--lm-head bf16 goes with --shape"),
        ("--model x --peer transformers", "--peer goes with --shape"),
        ("--shape qwen3-8b --peer transformers", "peer: got a model of family 'qwen3'"),
        ("--shape tiny --peer vllm", "argument --peer: invalid choice: 'vllm'"),
        ("--shape tiny --device tpu", "--device: got 'tpu'"),
        *((f"--shape tiny --device {d}", f"--device: got '{d}'") for d in ("cuda:", "cpu:01")),
        ("--shape tiny --device cpu:99999999999", "--device: got 'cpu:99999999999'"),
        ("--shape tiny --device cpu --json .", "--json: . is a folder, expected a file"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ostinato bench: error: {error}")
    assert printed.err.count("\n") == 1


def test_a_document_that_cannot_be_written_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["bench", "step", "--shape", "tiny", "--context", "2", "--json", "/dev/full"]
    assert main(argv) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("can't allocate:\n you tried 1 GB"), "can't allocate: you tried 1 GB"),
        (OverflowError("too large an int"), "too large an int"),
    ],
)
def test_too_large_a_cache_is_refused_in_one_line(
    error: Exception,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_args: object, **_sizes: object) -> PagedKVCache:
        raise error

    monkeypatch.setattr(PagedKVCache, "for_model", no_memory)
    assert main(["bench", "step", "--shape", "tiny", "--batch", "9", "--context", "8"]) == 2
    printed = capsys.readouterr().err
    assert printed == f"ostinato bench: error: batch 9, context 8: {reason}\n"


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127.0), ("fp8", 448.0)])
def test_random_8_bit_weights_are_those_of_a_checkpoint(dtype: str, largest: float) -> None:
    layer = random_decoder(TINY, dtype, CPU, max_context=8).layers[0].down
    assert isinstance(layer, W8A8Linear)
    assert isinstance(layer.weight, torch.Tensor)
    codes = layer.weight.float()
    assert (codes.abs().amax(1) == largest).all()  # each row has a scale of its own
    values = codes * layer.weight_scale[:, None]
    assert values.std() == pytest.approx(codes.shape[1] ** -0.5, rel=0.1)


def test_a_plan_is_checked_before_anything_is_made() -> None:
    model = random_decoder(TINY, "bf16", CPU, max_context=8)
    with pytest.raises(ValueError, match="batch: got -1"):
        time_steps(model, "tiny", StepPlan([1, -1], [8]))


def test_a_context_has_the_room_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Watched(PagedKVCache):
        @classmethod
        def for_model(cls, *args: Any, **sizes: Any) -> PagedKVCache:
            alive.append(sum(storage() is not None for storage in made))
            cache = super().for_model(*args, **sizes)
            made.append(weakref.ref(cache.storage))
            return cache

    monkeypatch.setattr("ostinato.bench.step.run.PagedKVCache", Watched)
    model = random_decoder(TINY, "bf16", CPU, max_context=16)
    assert len(list(time_steps(model, "tiny", StepPlan([1, 2], [4, 8, 16], repeats=10)))) == 6
    assert alive == [0, 0, 0]


# A layer of TINY's int8 step, and what is before and behind the layers: name, begin, end.
TRACE = [("memcpy", 0.0, 1.0), ("embed", 1.0, 2.0)]
LAYER = [("quantize_rows", 0.0, 2.0), ("tiled_gemm", 1.0, 5.0), ("append_heads", 5.0, 6.0)]
LAYER += [("paged_decode", 6.0, 10.0), ("quantize_rows", 9.0, 11.0), ("tiled_gemm", 10.0, 14.0)]
LAYER += [("quantize_rows", 14.0, 15.0), ("tiled_gemm", 14.0, 25.0), ("quantize_rows", 25.0, 26.0)]
LAYER += [("tiled_gemm", 26.0, 32.0)]


def traced_run() -> list[Span]:
    layers = [
        Span(2 + 32 * index + begin, 2 + 32 * index + end, name)
        for index in range(TINY.num_layers)
        for name, begin, end in LAYER
    ]
    end = layers[-1].end
    head = [Span(end, end + 9, "nvjet"), Span(end + 9, end + 12, "sample_rows")]
    return [*(Span(begin, end, name) for name, begin, end in TRACE), *layers, *head]


def test_a_breakdown_says_what_each_kernel_adds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roofline = Roofline(1e9, {1: 1e12, 2: 1e12})
    monkeypatch.setattr("ostinato.bench.step.run.roofline_of", lambda _: roofline)
    monkeypatch.setattr("ostinato.bench.step.run.trace", lambda _: [traced_run()] * 3)
    model = random_decoder(TINY, "int8", CPU, max_context=16)
    plan = StepPlan([2], [16], repeats=10, breakdown=True)
    [result] = time_steps(model, "tiny", plan)
    kernels = {kernel.kernel: kernel for kernel in result.kernels}
    layers, last = TINY.num_layers, traced_run()[-1].end
    assert sum(kernel.us for kernel in result.kernels) == last
    assert sum(kernel.share for kernel in result.kernels) == pytest.approx(1, abs=1e-3)
    assert kernels["gate_up"].launches == layers
    assert kernels["gate_up"].us == 10 * layers  # of the 11 it runs 1 is beside another
    gate_up = model.layers[0].gate_up.weight.shape.numel()
    assert kernels["gate_up"].floor_us == pytest.approx(layers * gate_up / 1e3, abs=0.01)
    assert kernels["gate_up"].tb_s == pytest.approx(gate_up / 10 / 1e6, rel=1e-3)
    keys = 2 * 16 * 2 * TINY.kv_size * 2
    assert kernels["attention"].floor_us == pytest.approx(layers * keys / 1e3, abs=0.01)
    assert kernels["sample_rows"].floor_us is None
    assert kernels["quantize_rows (down)"].tb_s is None
    rooflines = [kernel.floor_us or 0 for kernel in result.kernels]
    head = model.lm_head.weight.shape.numel() * 2 / 1e3  # another library's: in the step's roofline
    assert result.row.floor_us == pytest.approx(sum(rooflines) + head, abs=0.2)

    report = Report.for_device(CPU)
    monkeypatch.setattr("ostinato.cli.bench.step.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(Report, "for_device", lambda _: report)
    monkeypatch.setattr("ostinato.cli.bench.step._models", lambda *_: [("tiny", lambda: None)])
    monkeypatch.setattr("ostinato.bench.step.run.time_steps", lambda *_: [result])
    file = tmp_path / "step.json"
    flags = ["--breakdown", "--timeline", str(tmp_path), "--json", str(file)]
    assert main(["bench", "step", "--shape", "tiny", *flags]) == 0
    printed = capsys.readouterr().out
    count = f"{len(traced_run())} kernels and copies, {len(LAYER)} a layer"
    assert f"{last:9.1f} µs in {count}, their rooflines {result.row.floor_us} µs" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [row["section"] for row in rows] == ["step"] + ["step_kernels"] * len(kernels)
    assert b"gate_up" in (tmp_path / "tiny-b2-ctx16-ostinato_int8.svg").read_bytes()


def test_products_are_bound_by_what_takes_longer() -> None:
    model = random_decoder(TINY, "int8", CPU, max_context=16)
    size = model.layers[0].down.weight.shape.numel()
    reading = Roofline(1e9, {1: 1e15, 2: 1e15})
    _, roofline = kernel_rooflines(model, 4, 16, reading)["down"]
    assert (roofline.seconds, roofline.num_bytes) == (size / 1e9, size)
    multiplying = Roofline(1e15, {1: 1e9, 2: 5e8})
    _, roofline = kernel_rooflines(model, 4, 16, multiplying)["down"]
    assert roofline.seconds == pytest.approx(2 * 4 * size / 1e9)
    # Twice the bytes at half the speed of an 8-bit product.
    _, head = kernel_rooflines(model, 4, 16, multiplying)["lm_head"]
    assert head.seconds == pytest.approx(2 * 4 * model.lm_head.weight.shape.numel() / 5e8)


def test_no_roofline_is_made_up_for_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roofline_of(CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T4")
    assert roofline_of(torch.device("cuda")) is None
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert roofline_of(torch.device("cuda")) is not None


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_models(shape: str) -> None:
    assert read_config(SHAPES[shape]).dtype is torch.bfloat16


@pytest.mark.parametrize("name", PRECISIONS)
def test_random_weights_give_finite_logits(name: str, device: torch.device) -> None:
    model = random_decoder(TINY, name, device, max_context=8)
    assert precision(model) == name
    assert all(tensor.device.type == device.type for tensor in model.tensors())
    x = torch.randn(4, TINY.hidden_size, dtype=torch.bfloat16, device=device)
    for layer in model.layers:
        for linear in (layer.qkv, layer.o):
            assert 0.5 < linear(x).float().std() < 2


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(
        ValueError, match="precision: got 'int4', expected one of int8, fp8, fp8-block"
    ):
        random_decoder(TINY, "int4", CPU, max_context=8)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "size"), [("int8", 1), ("bf16", 2)])
def test_the_work_of_a_step(tied: bool, name: str, size: int) -> None:
    config = read_config({**SHAPES["tiny"], "tie_word_embeddings": tied})
    model = random_decoder(config, name, CPU, max_context=8)
    # Per layer: qkv [128, 64], o [64, 64], gate_up [256, 64], down [64, 128]; lm_head [512, 64].
    layer, head, rows = 128 * 64 + 64 * 64 + 256 * 64 + 64 * 128, 512 * 64, 128 + 64 + 256 + 64
    scales = 4 * rows if name == "int8" else 0
    norms = 2 * 64 * (2 * 2 + 1)
    assert weight_bytes(model, batch=3) == 2 * (layer * size + scales) + 2 * head + norms
    # Per sequence and layer 7 keys and 7 values, of two heads of 16 in bf16 each.
    assert kv_bytes(config, batch=3, context=7) == 3 * 2 * 7 * 2 * 32 * 2
    # Attention: for each of 64 query elements a product with every key and every value.
    assert step_flops(model, batch=3, context=7) == 2 * 3 * (2 * layer + head + 2 * 7 * 2 * 64)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 32 * 2),
        ({"dtype": "fp8", "scales": "static"}, 32),
        ({"dtype": "fp8", "scales": "token"}, 32 + 2 * 4),
        ({"dtype": "int8", "scales": "token"}, 32 + 2 * 4),
    ],
)
def test_8_bit_keys_are_read_with_their_scales(options: dict[str, Any], each: int) -> None:
    stored = kv_format(TINY, None, **options)
    assert kv_bytes(TINY, 3, 7, stored) == 3 * 2 * 7 * 2 * each
    model = random_decoder(TINY, "bf16", CPU, max_context=16)
    _, found = kernel_rooflines(model, 3, 7, Roofline(1e9, {1: 1e18, 2: 1e18}), stored)["attention"]
    assert found.num_bytes == 3 * 7 * 2 * each
    assert found.seconds == pytest.approx(found.num_bytes / 1e9)


def test_a_sliding_window_bounds_the_keys_read() -> None:
    windowed = {**SHAPES["tiny"], "model_type": "mistral", "sliding_window": 5}
    config = read_config(windowed)
    assert kv_bytes(config, batch=1, context=100) == kv_bytes(TINY, batch=1, context=5)
    assert kv_bytes(config, batch=1, context=3) == kv_bytes(TINY, batch=1, context=3)


def test_calls_are_timed_one_by_one(device: torch.device) -> None:
    calls = []
    times = time_calls(lambda: calls.append(1), device, repeats=12, warmup=4)
    assert len(calls) == 16
    assert len(times) == 12
    assert all(0 <= time < 1 for time in times)
    with pytest.raises(ValueError, match="repeats: got 9, expected at least 10"):
        time_calls(lambda: None, device, repeats=9)


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (1, 1), (50, 3), (60, 3), (61, 4), (99, 5), (100, 5)]
)
def test_percentiles_are_values_of_the_sample(percent: float, value: float) -> None:
    assert percentile([5, 3, 1, 2, 4], percent) == value


def test_an_empty_sample_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="sample: got no values"):
        percentile([], 50)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_report_survives_json(count: int, tmp_path: Path) -> None:
    row = Row.of("gemm", "N1 K2 M3", "ostinato_int8", seconds=2e-6, num_bytes=4e6, flops=6e6)
    assert (row.us, row.tb_s, row.tflop_s) == (2.0, 2.0, 3.0)
    report = Report("Some GPU", {"torch": "2.13.0", "cuda": None}, None, [row] * count)
    file = tmp_path / "report.json"
    report.write(file)
    document = json.loads(file.read_text())
    assert document["gpu"] == "Some GPU"
    assert document["versions"] == {"torch": "2.13.0", "cuda": None}
    assert document["commit"] is None
    assert [Row(**fields) for fields in document["rows"]] == [row] * count
