"""Verification: a replay must give what the step gives, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backends.base import Backend
from .buffers import BatchView, StaticBuffers
from .graph import Graph
from .graph_key import Key
from .outputs import Outputs, Step
from .process_group import CaptureGroup

_SEED = 0x0571A70
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_difference(
    step: Step,
    buffers: StaticBuffers,
    backend: Backend,
    graph: Graph,
    key: Key,
    group: CaptureGroup | None = None,
) -> str | None:
    """Compare replays of `graph` with calls of the step, for several numbers of real rows.

    Inputs are drawn by the buffers' examples. Outputs are poisoned before each replay, so that one
    that is not written is found; NaNs are equal to each other. A full batch comes last, and if all
    agree its examples stay in the buffers.

    Returns:
        None when all outputs agree, else the first difference: bucket, rows, output and place.

    Raises:
        ValueError: when an example does not return rows of its buffer.
        RankError: when another rank has failed or found a difference.
    """
    group = group or CaptureGroup(None)
    generator = torch.Generator().manual_seed(_SEED)
    bucket = key.batch_size
    batch = buffers.view(bucket, key.variant)
    owned = backend.inspector.owned(graph.outputs)
    for n in sorted({1, (bucket + 1) // 2, bucket}):
        inputs = _example_inputs(buffers, generator, n)
        expected = _call(step, buffers, inputs, n, batch)
        _poison(graph.outputs, owned, expected)
        if n == bucket:
            # The step's own memory still holds the expected results, for a replay that lacks a
            # launch to pick up: a call on padding, harmless by definition, writes others there.
            # Once is enough: a graph lacks the same launches whatever it is given.
            buffers.stage_padding(bucket)
            step(batch)
        buffers.stage(inputs, n, bucket)
        graph.replay()
        what = f"{key} with {n} real rows"
        # Before this one waits for the device, which may wait for another rank.
        group.agree(f"verify {what}")
        difference = _first_difference(expected, graph.outputs, n)
        if difference is not None:
            difference = f"{what}: the replay differs from the step: {difference}"
        problem = None if difference is None else f"VerificationError: {difference}"
        group.agree(f"compare {what}", problem)
        if difference is None:
            continue
        if group.size == 1:  # else the others would have to call it too
            again = _call(step, buffers, inputs, n, batch)
            if _first_difference(expected, again, n) is not None:
                difference += (
                    "; the step itself gave two results for the same inputs: it draws random "
                    "numbers, reads state that it also changes, or runs an operator that is not "
                    "deterministic (torch.use_deterministic_algorithms(True) names those it knows)"
                )
        return difference
    return None


def _example_inputs(
    buffers: StaticBuffers, generator: torch.Generator, n: int
) -> dict[str, torch.Tensor]:
    inputs = {}
    for name, spec in buffers.specs.items():
        shape = (n, *spec.shape)
        if spec.example is None:
            inputs[name] = torch.full((1,), spec.pad, dtype=spec.dtype, device="cpu").expand(shape)
            continue
        rows = spec.example(generator, shape)
        if not isinstance(rows, torch.Tensor) or rows.shape != shape:
            got = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise ValueError(f"specs[{name!r}].example: returned {got}, expected a tensor {shape}")
        inputs[name] = rows.to(spec.dtype)
    return inputs


def _call(
    step: Step, buffers: StaticBuffers, inputs: dict[str, torch.Tensor], n: int, batch: BatchView
) -> Outputs:
    buffers.stage(inputs, n, batch.size)
    outputs = Outputs.of(step(batch), batch)
    return outputs.like([tensor.clone() for tensor in outputs.tensors])


def _poison(outputs: Outputs, owned: Sequence[int], expected: Outputs) -> None:
    """Fill the outputs at the indices `owned` with NaN, or with integers other than expected."""
    for index in owned:
        tensor, values = outputs.tensors[index], expected.tensors[index]
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # an expanded dimension: one element seen many times
                tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.copy_(values.logical_not())
        else:
            # As other integers of that size: torch has few operators for unsigned ones.
            integer = _INTEGERS[tensor.element_size()]
            tensor.view(integer).copy_(values.view(integer).bitwise_not())


def _first_difference(expected: Outputs, got: Outputs, n: int) -> str | None:
    names = zip(expected.names, expected.tensors, got.tensors, strict=True)
    for name, eager, replayed in names:
        unequal = _unequal(eager[:n], replayed[:n])
        count = int(unequal.sum())
        if count:
            place = tuple(unequal.nonzero()[0].tolist())
            rows = int(unequal.flatten(1).any(1).sum()) if unequal.dim() > 1 else count
            return (
                f"{name} in {count} of {unequal.numel()} values, {rows} of {n} rows, first at "
                f"{list(place)}: step {eager[place].item()}, replay {replayed[place].item()}"
            )
    return None


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where two tensors differ in bits, other than between NaNs."""
    if a.is_complex():
        return _unequal(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
    integer = _INTEGERS[a.element_size()]
    unequal = a.contiguous().view(integer) != b.contiguous().view(integer)
    if a.is_floating_point():
        # Through float32 since 8-bit floats have no comparisons of their own.
        unequal &= ~(a.float().isnan() & b.float().isnan())
    return unequal
