"""The kernel behind `embed` on a GPU: one launch, in captured graphs, and within its tensors."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from ops_cases import FLOATS, assert_same_bits

from ostinato import ops
from ostinato.graphs import BatchView, BufferSpec, GraphRunner, StaticBuffers
from ostinato.ops.common.pdl import pdl

embed_module = import_module("ostinato.ops.embed")  # `ostinato.ops.embed` is the op

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

CUDA = torch.device("cuda")
FAR = (30, -1, 2**31, 2**32 + 1, -(2**31), -(2**32) + 2, 2**63 - 1, -(2**63))


def inside(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory and a tensor in the middle of it."""
    around = torch.zeros(rows + 2, columns + 16, dtype=dtype, device=CUDA)
    return around, around[1:-1, 8:-8]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [64, 61])
def test_ids_out_of_range_are_taken_for_the_last(dtype: torch.dtype, dim: int) -> None:
    table = torch.randn(30, dim, device=CUDA).to(dtype)
    marks, seen = inside(5, 30, torch.bool)
    tokens = torch.tensor([7, *FAR], device=CUDA)
    rows = torch.tensor([*FAR, 3], device=CUDA)
    out = ops.embed(tokens, table, seen=seen, seen_rows=rows)
    assert_same_bits(out, table[[7, *[29] * len(FAR)]])
    assert seen.nonzero().tolist() == [[3, 29], [4, 7], [4, 29]]
    assert marks.sum() == 3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("count", "dim"), [(1, 4096), (9, 4096), (256, 2048), (70, 61), (3, 9000)])
def test_padding_is_left_as_it_is(dtype: torch.dtype, count: int, dim: int) -> None:
    table = torch.randn(500, dim, device=CUDA).to(dtype)
    tokens, rows = torch.randint(500, (count,), device=CUDA), torch.arange(count, device=CUDA)
    for real in sorted({0, 1, count // 2, count - 1, count, count + 5}):
        n_active = torch.tensor([real], dtype=torch.int32, device=CUDA)
        out = torch.full((count, dim), 77, dtype=dtype, device=CUDA)
        seen = torch.zeros(count, 500, dtype=torch.bool, device=CUDA)
        ops.embed(tokens, table, seen=seen, seen_rows=rows, n_active=n_active, out=out)
        assert_same_bits(out[:real], table[tokens[:real]])
        assert (out[real:] == 77).all()
        marked = seen.nonzero()
        assert marked[:, 0].tolist() == list(range(min(real, count)))
        assert torch.equal(marked[:, 1], tokens[:real])


@pytest.mark.parametrize("name", ["table", "out"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_no_vector_fits(name: str, dtype: torch.dtype) -> None:
    storage = {
        "table": torch.randn(40, 129, device=CUDA).to(dtype),
        "out": torch.zeros(6, 129, dtype=dtype, device=CUDA),
    }
    views = {key: x[:, 1:] if key == name else x[:, :128].clone() for key, x in storage.items()}
    tokens = torch.randint(40, (6,), device=CUDA)
    ops.embed(tokens, **views)
    assert_same_bits(views["out"], views["table"][tokens])
    assert not storage["out"][:, 0].any()


def test_one_graph_serves_many_tokens() -> None:
    count, vocabulary, dim = 12, 1000, 512
    table = torch.randn(vocabulary, dim, device=CUDA).bfloat16()
    tokens, rows = (torch.zeros(count, dtype=torch.int64, device=CUDA) for _ in "tr")
    n_active = torch.full((1,), count, dtype=torch.int32, device=CUDA)
    seen = torch.zeros(5, vocabulary, dtype=torch.bool, device=CUDA)
    out = torch.zeros(count, dim, dtype=torch.bfloat16, device=CUDA)
    options = {"seen": seen, "seen_rows": rows, "n_active": n_active, "out": out}
    ops.embed(tokens, table, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.embed(tokens, table, **options)
    for turn in range(20):
        tokens.random_(vocabulary)
        rows.random_(5)
        real = count - turn % 3
        n_active.fill_(real)
        want = seen.random_(2).clone()
        want[rows[:real], tokens[:real]] = True
        graph.replay()
        assert_same_bits(out[:real], table[tokens[:real]])
        assert torch.equal(seen, want)


def test_it_is_one_kernel_and_what_follows_overlaps_it() -> None:
    table = torch.randn(100, 256, device=CUDA).bfloat16()
    seen = torch.zeros(9, 100, dtype=torch.bool, device=CUDA)

    def step(batch: BatchView) -> torch.Tensor:
        options = {"seen": seen, "seen_rows": batch.slots, "n_active": batch.n_active}
        x = ops.embed(batch.tokens, table, **options)
        return ops.quantize_per_token(x, torch.int8, n_active=batch.n_active)[0]

    specs = {
        "tokens": BufferSpec((), torch.int64, 0),
        "slots": BufferSpec((), torch.int64, 8),
    }
    memory = {"table": table, "seen": seen}
    with GraphRunner(step, StaticBuffers(specs, 8, CUDA), memory=memory) as runner:
        report = runner.capture([1, 8], progress=False, verify=False, audit="strict")
        assert report.not_inspected is None
        for graph in report.graphs:
            assert graph.nodes == {"kernel": 2}
            assert graph.pdl_edges == 1, str(report)
            assert all("ostinato" in name for name in graph.kernels or {}), graph.kernels
            assert sum("embed" in name for name in graph.kernels or {}) == 1


def test_a_chain_of_launches_waits_for_each_one() -> None:
    """Every launch writes the tokens of the next one into the memory that it reads them from."""
    vocabulary = 512
    # Two fp32 numbers of a row are the bits of the next token.
    successors = torch.randperm(vocabulary, device=CUDA)
    table = successors.view(torch.float32).view(vocabulary, 2)
    results = []
    for overlap in (True, False):
        tokens = torch.arange(300, device=CUDA)
        seen = torch.zeros(301, vocabulary, dtype=torch.bool, device=CUDA)
        rows = torch.arange(300, device=CUDA)
        other = torch.empty_like(tokens)
        with pdl(overlap):
            for _ in range(200):
                out = other.view(torch.float32).view(300, 2)
                ops.embed(tokens, table, seen=seen, seen_rows=rows, out=out)
                tokens, other = other, tokens
        results.append((tokens, seen))
    for overlapped, alone in zip(*results, strict=True):
        assert torch.equal(overlapped, alone)


def test_tables_and_outputs_of_more_than_2_31_elements() -> None:
    dim = 4096
    vocabulary = 2**31 // dim + 9
    table = torch.empty(vocabulary, dim, dtype=torch.bfloat16, device=CUDA)
    ids = [0, 5, vocabulary - 1, vocabulary - 9]
    table[ids] = torch.randn(4, dim, device=CUDA).bfloat16()
    assert_same_bits(ops.embed(torch.tensor(ids, device=CUDA), table), table[ids])
    tokens = torch.tensor(ids, device=CUDA).repeat(vocabulary // 4 + 1)
    out = ops.embed(tokens, table)
    assert out.numel() > 2**31
    for part in (slice(0, 400), slice(len(out) - 400, len(out))):
        assert_same_bits(out[part], table[tokens[part]])


def test_more_than_2_31_marks() -> None:
    vocabulary, sets = 2**17, 2**14 + 3
    table = torch.zeros(vocabulary, 8, dtype=torch.bfloat16, device=CUDA)
    seen = torch.zeros(sets, vocabulary, dtype=torch.bool, device=CUDA)
    tokens = torch.tensor([vocabulary - 1, 4], device=CUDA)
    rows = torch.tensor([sets - 1, sets - 2], device=CUDA)
    ops.embed(tokens, table, seen=seen, seen_rows=rows)
    assert seen.nonzero().tolist() == [[sets - 2, 4], [sets - 1, vocabulary - 1]]


def test_bad_input_is_refused_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_module, "load", lambda *_, **__: pytest.fail("launches"))
    table = torch.zeros(9, 8, device=CUDA)
    with pytest.raises(ValueError, match="tokens: got a tensor on cpu, expected one on cuda:0"):
        ops.embed(torch.arange(3), table)
    with pytest.raises(ValueError, match="tokens: got 9 for token 0, expected -1 to 8"):
        ops.embed(torch.tensor([9], device=CUDA), table, check_bounds=True)
