import copy

import numpy as np
import pytest
import torch
from graphs_toys import PAD_TOKEN, SPECS, WIDTH, toy_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.graphs import BufferSpec, StaticBuffers, Variant
from ostinato.graphs.packed_inputs import PackedInputs

NAN = float("nan")


def zero(dtype: torch.dtype) -> float | int | bool:
    return torch.zeros((), dtype=dtype).item()


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.bool, True),
        (torch.uint8, 255),
        (torch.int32, -(2**31)),
        (torch.int64, 2**63 - 1),
        (torch.float32, 1),
        (torch.float16, 65504.0),
        (torch.bfloat16, NAN),
        (torch.float32, -float("inf")),
        (torch.float8_e4m3fn, 0.0),
        (torch.float8_e4m3fn, NAN),
        (torch.float8_e5m2, float("inf")),
    ],
)
def test_buffers_begin_as_padding(dtype, pad, device):
    buffers = StaticBuffers({"x": BufferSpec((2,), dtype, pad)}, 4, device)
    expected = torch.full((4, 2), pad, dtype=dtype).float()
    torch.testing.assert_close(buffers.view(4).x.float().cpu(), expected, equal_nan=True)
    assert buffers.n_active.tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"shape": [3]}, TypeError, r"shape: got \[3\]"),
        ({"shape": (2.0,)}, TypeError, "shape: got"),
        ({"shape": (2, 0)}, ValueError, r"shape: got \(2, 0\)"),
        ({"dtype": "float32"}, TypeError, "dtype: got 'float32'"),
        ({"dtype": torch.complex64}, ValueError, "dtype: got torch.complex64"),
        ({"dtype": torch.qint8}, ValueError, "dtype: got torch.qint8"),
        ({"dtype": torch.bits8}, ValueError, "dtype: got torch.bits8"),
        ({"shape": (True,)}, TypeError, r"shape: got \(True,\)"),
        ({"example": 3}, TypeError, "example: got 3"),
        ({"pad": 0.5}, TypeError, "pad: got 0.5"),
        ({"pad": True}, TypeError, "pad: got True"),
        ({"pad": 2**31}, ValueError, "pad: got 2147483648, which torch.int32"),
        ({"dtype": torch.bool}, TypeError, "pad: got 0"),
        ({"dtype": torch.float16, "pad": 1e6}, ValueError, "pad: got 1000000.0"),
        ({"dtype": torch.float8_e4m3fn, "pad": float("inf")}, ValueError, "pad: got inf"),
        ({"dtype": torch.float32, "pad": 10**400}, ValueError, "pad: got 1000"),
        ({"dtype": torch.float32, "pad": "0"}, TypeError, "pad: got '0'"),
    ],
)
def test_bad_specs(arguments, error, match):
    with pytest.raises(error, match=match):
        BufferSpec(**{"shape": (), "dtype": torch.int32, "pad": 0, **arguments})


@pytest.mark.parametrize(
    ("specs", "max_batch", "place", "error", "match"),
    [
        ({}, 8, "cpu", ValueError, "specs: got none"),
        ([SPECS["tokens"]], 8, "cpu", TypeError, "specs: got list"),
        ({"x": torch.int64}, 8, "cpu", TypeError, r"specs\['x'\]: got dtype"),
        ({"two words": SPECS["tokens"]}, 8, "cpu", ValueError, "name 'two words'"),
        ({3: SPECS["tokens"]}, 8, "cpu", ValueError, "name 3"),
        ({"size": SPECS["tokens"]}, 8, "cpu", ValueError, "name 'size'"),
        ({"n_active": SPECS["tokens"]}, 8, "cpu", ValueError, "name 'n_active'"),
        ({"_x": SPECS["tokens"]}, 8, "cpu", ValueError, "name '_x'"),
        ({"variant": SPECS["tokens"]}, 8, "cpu", ValueError, "name 'variant'"),
        (SPECS, 0, "cpu", ValueError, "max_batch: got 0"),
        (SPECS, 2.0, "cpu", TypeError, "max_batch: got 2.0"),
        (SPECS, True, "cpu", TypeError, "max_batch: got True"),
        (SPECS, 8, "meta", ValueError, "device: got meta"),
    ],
)
def test_bad_buffers(specs, max_batch, place, error, match):
    with pytest.raises(error, match=match):
        StaticBuffers(specs, max_batch, place)


def test_views_never_move_and_share_the_number_of_rows(buffers):
    view = buffers.view(3)
    addresses = {name: view[name].data_ptr() for name in SPECS}
    buffers.stage(toy_inputs(5), 5, 8)
    assert view is buffers.view(3)
    assert view.size == 3
    assert view.variant == Variant()
    assert view.hidden.shape == (3, WIDTH)
    assert view.n_active.data_ptr() == buffers.n_active.data_ptr()
    assert view.n_active.tolist() == [5]
    inputs = toy_inputs(3)
    buffers.stage(inputs, 3, 3)
    assert {name: view[name].data_ptr() for name in SPECS} == addresses
    assert torch.equal(view.hidden.cpu(), inputs["hidden"])


def test_views_of_variants_share_their_memory(buffers):
    other = Variant(q_len=2, name="draft")
    view = buffers.view(3, other)
    assert view is buffers.view(3, other)
    assert view is not buffers.view(3)
    assert view.variant.q_len == 2
    assert view.hidden.data_ptr() == buffers.view(3).hidden.data_ptr()


@given(st.integers(1, 8), st.data())
def test_buffers_of_a_batch_do_not_overlap_and_are_aligned(size, data):
    dtypes = st.sampled_from([torch.bool, torch.int16, torch.int64, torch.bfloat16])
    widths = st.lists(st.tuples(dtypes, st.integers(1, 40)), min_size=1, max_size=6)
    specs = {
        f"b{index}": BufferSpec((width,), dtype, zero(dtype))
        for index, (dtype, width) in enumerate(data.draw(widths))
    }
    view = StaticBuffers(specs, 8, "cpu").view(size)
    begin = view.n_active.data_ptr()
    ends = [begin + 4]
    for name in specs:
        assert (view[name].data_ptr() - begin) % 256 == 0
        assert view[name].data_ptr() >= ends[-1]
        ends.append(view[name].data_ptr() + view[name].nbytes)


def test_view_of_unknown_buffers_and_sizes(buffers):
    view = buffers.view(2)
    with pytest.raises(AttributeError, match=r"no buffer 'logits', only \['hidden', 'tokens'\]"):
        _ = view.logits
    with pytest.raises(KeyError, match="no buffer 'logits'"):
        view["logits"]
    for n in (0, 9):
        with pytest.raises(ValueError, match=f"n: got {n}, expected 1 to the buffers' max_batch=8"):
            buffers.view(n)
    assert copy.copy(view).size == 2


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 7), st.booleans()), min_size=1, max_size=8
    )
)
def test_staged_rows_are_the_inputs_and_the_rest_is_padding(runs, buffers):
    for n, more, on_device in runs:
        bucket = min(n + more, 8)
        inputs = toy_inputs(n, buffers.device if on_device else "cpu")
        buffers.stage(inputs, n, bucket)
        view = buffers.view(bucket)
        assert torch.equal(view.tokens[:n].cpu(), inputs["tokens"].cpu())
        assert torch.equal(view.hidden[:n].cpu(), inputs["hidden"].cpu())
        assert (view.tokens[n:] == PAD_TOKEN).all()
        assert (view.hidden[n:] == -1.0).all()
        assert buffers.n_active.tolist() == [n]


@given(
    widths=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    size=st.integers(1, 8),
    data=st.data(),
)
def test_pieces_of_a_batch_cover_all_rows_but_those_left_out(widths, size, data):
    names = [f"b{index}" for index in range(len(widths))]
    specs = {
        name: BufferSpec((width,), torch.int64, 0)
        for name, width in zip(names, widths, strict=True)
    }
    device = torch.device("cpu")
    to, other = PackedInputs(specs, 8, device), PackedInputs(specs, 8, device)
    other.packed(8).fill_(1)
    n = data.draw(st.integers(0, size))
    without = tuple(data.draw(st.sets(st.sampled_from(names))))
    torch._foreach_copy_(to.pieces(size, n, without), other.pieces(size, n, without))
    expected = torch.ones(to.packed(size).numel(), dtype=torch.uint8)
    for name in without:
        begin = to.batch(size)[name].data_ptr() - to.packed(size).data_ptr()
        expected[begin : begin + n * specs[name].row_bytes] = 0
    assert torch.equal(to.packed(size), expected)
    beyond = to.packed(8)[len(expected) :]
    assert not beyond.any()


@pytest.mark.parametrize("device", [None, "no device", [0]], ids=str)
def test_what_is_no_device_is_named(device):
    with pytest.raises(TypeError, match="device: got"):
        StaticBuffers({"x": BufferSpec((), torch.int32, 0)}, 4, device)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="device: got cuda, expected cpu: torch finds no GPU"):
        StaticBuffers({"x": BufferSpec((), torch.int32, 0)}, 4, "cuda")


def test_inputs_of_both_places_are_staged_together(device):
    specs = {
        "words": BufferSpec((3,), torch.int64, -1),
        "doubles": BufferSpec((), torch.float64, 0.5),
        "ints": BufferSpec((5,), torch.int32, -2),
        "strided": BufferSpec((2,), torch.int64, -3),
        "host": BufferSpec((7,), torch.float32, -4.0),
    }
    buffers = StaticBuffers(specs, 8, device)
    for n, bucket in ((1, 1), (3, 4), (8, 8), (2, 8)):
        inputs = {
            "words": torch.randint(99, (n, 3), device=device),
            "doubles": torch.rand(n, dtype=torch.float64, device=device),
            "ints": torch.randint(99, (n, 5), dtype=torch.int32, device=device),
            "strided": torch.randint(99, (2, n), device=device).T,
            "host": torch.rand(n, 7),
        }
        buffers.stage(inputs, n, bucket)
        view = buffers.view(bucket)
        for name, spec in specs.items():
            assert torch.equal(view[name][:n].cpu(), inputs[name].cpu())
            assert (view[name][n:] == spec.pad).all()
        assert buffers.n_active.tolist() == [n]


def test_staging_padding_only(buffers):
    buffers.stage(toy_inputs(8), 8, 8)
    buffers.stage_padding(4)
    assert (buffers.view(4).tokens == PAD_TOKEN).all()
    assert buffers.n_active.tolist() == [0]
    with pytest.raises(ValueError, match="bucket: got 9"):
        buffers.stage_padding(9)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, [1, 2]),
        (torch.int32, (1, 2)),
        (torch.int32, range(1, 3)),
        (torch.int32, np.array([1, 2])),
        (torch.int32, np.array([1, 2])[::-1]),
        (torch.uint8, [255, 0]),
        (torch.uint16, [65535, 0]),
        (torch.int32, np.array([65535, 1], np.uint16)),
        (torch.int64, np.array([2**32 - 1, 1], np.uint32)),
        (torch.uint32, np.array([2**32 - 1, 1], np.uint64)),
        (torch.uint64, [2**63 - 1, 0]),
        (torch.int32, [True, False]),
        (torch.float32, [1, 2]),
        (torch.float64, [0.1, 0.2]),
        (torch.float64, [1e300, float("inf")]),
        (torch.float32, np.array([0.1, -float("inf")])),
        (torch.float16, [65504.0, -65504.0]),
        (torch.float16, [65504, float("inf")]),
        (torch.float8_e5m2, [57344.0, -float("inf")]),
        (torch.bfloat16, [0.5, NAN]),
        (torch.bool, [True, False]),
    ],
)
def test_sequences_of_numbers(dtype, value, device):
    buffers = StaticBuffers({"x": BufferSpec((), dtype, zero(dtype))}, 4, device)
    buffers.stage({"x": value}, 2, 2)
    expected = torch.tensor(list(value), dtype=dtype)
    got = buffers.view(2).x.cpu()
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "value", "error", "match"),
    [
        (torch.int64, [0.5, 1.0], TypeError, r"inputs\['x'\]: got numbers of torch.float32"),
        (torch.bool, [0, 1], TypeError, r"inputs\['x'\]: got numbers of torch.int64"),
        (torch.int32, [0, 2**31], ValueError, r"inputs\['x'\]: got numbers from 0 to 2147483648"),
        (torch.uint8, [-1, 0], ValueError, r"inputs\['x'\]: got numbers from -1 to 0"),
        (torch.int64, np.array([2**63, 1], np.uint64), ValueError, "from 1 to 9223372036854775808"),
        (torch.uint32, [-1, 0], ValueError, "got numbers from -1 to 0, expected 0 to 4294967295"),
        (torch.float16, [0, 1e6], ValueError, r"inputs\['x'\]: got numbers up to 1000000.0 "),
        (torch.float16, [0, -70000], ValueError, "expected at most 65504.0 for torch.float16"),
        (torch.float32, np.array([0, 1e300]), ValueError, r"inputs\['x'\]: got numbers up to 1e"),
        (torch.float8_e4m3fn, [NAN, 1e6], ValueError, "expected at most 448.0"),
        (torch.float8_e4m3fn, [0, -float("inf")], ValueError, "got numbers up to inf in magnitude"),
        (torch.int64, [0, 2**80], TypeError, r"inputs\['x'\]: got list"),
        (torch.float32, [0, 10**400], TypeError, r"inputs\['x'\]: got list.*too large"),
        (torch.float32, np.array([1 + 2j, 0]), TypeError, "got numbers of complex128, expected"),
        (torch.int64, "ab", TypeError, r"inputs\['x'\]: got str"),
        (torch.int64, None, TypeError, r"inputs\['x'\]: got NoneType"),
        (torch.int64, [[1], [2, 3]], TypeError, r"inputs\['x'\]: got list"),
        (torch.int64, [1], ValueError, r"inputs\['x'\]: got shape \(1,\), expected \(2,\)"),
        (torch.int64, [], ValueError, r"inputs\['x'\]: got shape \(0,\), expected \(2,\)"),
        (torch.int64, [[1], [2]], ValueError, r"inputs\['x'\]: got shape \(2, 1\)"),
        (torch.int64, torch.zeros(2), TypeError, r"got torch.float32, expected torch.int64"),
        (torch.int64, torch.zeros(3, dtype=torch.int64), ValueError, r"got shape \(3,\)"),
        (torch.float32, torch.zeros(2, device="meta"), ValueError, "got a tensor on meta"),
        (torch.float32, torch.zeros(2).to_sparse(), ValueError, "got layout torch.sparse_coo"),
    ],
)
def test_bad_inputs_change_nothing(dtype, value, error, match, device):
    specs = {"first": BufferSpec((), torch.int64, 3), "x": BufferSpec((), dtype, zero(dtype))}
    buffers = StaticBuffers(specs, 4, device)
    with pytest.raises(error, match=match):
        buffers.stage({"first": [1, 2], "x": value}, 2, 4)
    assert buffers.view(4).first.tolist() == [3, 3, 3, 3]
    assert buffers.n_active.tolist() == [0]


def test_missing_and_unknown_inputs(buffers):
    with pytest.raises(ValueError, match=r"missing \['hidden'\], unknown \['hiden'\]"):
        buffers.stage({"tokens": [1], "hiden": [[0.0] * WIDTH]}, 1, 1)
    with pytest.raises(TypeError, match="inputs: got list"):
        buffers.stage([1], 1, 1)


@pytest.mark.parametrize(
    ("n", "bucket", "match"),
    [(0, 4, "n: got 0"), (5, 4, "n: got 5"), (1, 9, "bucket: got 9"), (1, 0, "bucket: got 0")],
)
def test_bad_staging_sizes(n, bucket, match, buffers):
    with pytest.raises(ValueError, match=match):
        buffers.stage(toy_inputs(max(n, 1)), n, bucket)


@pytest.mark.parametrize("n", [1.0, "1", None, True])
def test_staging_sizes_that_are_no_integers(n, buffers):
    for call in (
        lambda: buffers.view(n),
        lambda: buffers.stage(toy_inputs(1), n, 4),
        lambda: buffers.stage(toy_inputs(1), 1, n),
        lambda: buffers.stage_padding(n),
    ):
        with pytest.raises(TypeError, match=r"got .*, expected an integer"):
            call()


def test_views_of_integers_of_other_libraries(buffers):
    assert buffers.view(np.int64(3)) is buffers.view(3)
    assert buffers.view(torch.tensor(3)) is buffers.view(3)
    assert type(buffers.view(np.int64(5)).size) is int


def test_inputs_that_are_not_contiguous_or_require_grad(buffers):
    hidden = torch.randn(WIDTH, 4, requires_grad=True).T
    buffers.stage({"tokens": torch.arange(8)[::2], "hidden": hidden}, 4, 4)
    view = buffers.view(4)
    assert view.tokens.tolist() == [0, 2, 4, 6]
    assert torch.equal(view.hidden.cpu(), hidden.detach())
    assert not view.hidden.requires_grad


def test_buffers_made_in_inference_mode_are_written_outside_it(device):
    with torch.inference_mode():
        buffers = StaticBuffers(SPECS, 8, device)
        buffers.stage(toy_inputs(2), 2, 4)
    inputs = toy_inputs(3)
    buffers.stage(inputs, 3, 4)
    assert torch.equal(buffers.view(3).tokens.cpu(), inputs["tokens"])


def test_inputs_that_are_views_of_buffers_are_read_first(device):
    spec = BufferSpec((), torch.int64, -1)
    buffers = StaticBuffers({"x": spec, "y": spec}, 4, device)
    buffers.stage({"x": [1, 2, 3], "y": [4, 5, 6]}, 3, 4)
    view = buffers.view(4)
    buffers.stage({"x": view.x[:3], "y": [7, 8, 9]}, 3, 4)
    assert view.x.tolist() == [1, 2, 3, -1]
    buffers.stage({"x": view.y[:3], "y": view.x[:3]}, 3, 4)
    assert (view.x.tolist(), view.y.tolist()) == ([7, 8, 9, -1], [1, 2, 3, -1])
    buffers.stage({"x": view.y, "y": view.x}, 4, 4)
    assert (view.x.tolist(), view.y.tolist()) == ([1, 2, 3, -1], [7, 8, 9, -1])
