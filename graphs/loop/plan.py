"""The rules of a burst as the device reads them: addresses and sizes, all of them 64-bit words.

The layout is that of `Plan` and `Rule` in advance.cu.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..buffer_spec import BufferSpec
from ..buffers import BatchView
from ..outputs import Outputs
from .memory import BurstMemory
from .rules import Add, BurstRules, Feed, Rule, Slot, output_of

_KEEP, _FEED, _ADD, _SLOT = range(4)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(
    rules: BurstRules,
    specs: Mapping[str, BufferSpec],
    batch: BatchView,
    outputs: Outputs,
    memory: BurstMemory,
) -> torch.Tensor:
    """Return the plan of a batch size, on its device."""
    recorded = output_of(outputs, rules.record, "record")
    words = [len(specs), recorded.data_ptr(), recorded.element_size(), _row_bytes(recorded)]
    words += [memory.max_batch, rules.max_stops]
    for name in specs:
        words += _rule(name, rules.next.get(name), batch, specs, outputs)
    with torch.inference_mode(False):
        return torch.tensor(words, dtype=torch.int64, device=batch.n_active.device)


def _rule(
    name: str,
    rule: Rule | None,
    batch: BatchView,
    specs: Mapping[str, BufferSpec],
    outputs: Outputs,
) -> list[int]:
    buffer = batch[name]
    kind, source = _KEEP, [0] * 7
    if isinstance(rule, Feed):
        fed = output_of(outputs, rule.output, name)
        kind, source = _FEED, [fed.data_ptr(), _row_bytes(fed), *[0] * 5]
    elif isinstance(rule, Add):
        kind, source = _ADD, [rule.amount, *[0] * 6]
    elif isinstance(rule, Slot):
        table, positions = batch[rule.table], batch[rule.positions]
        kind = _SLOT
        source = [table.data_ptr(), table.size(1), table.element_size()]
        source += [int(specs[rule.table].pad), rule.page_size]
        source += [positions.data_ptr(), positions.element_size()]
    elements = buffer[0].numel()
    return [
        *(kind, buffer.data_ptr(), buffer.element_size(), elements, _bits_of_pad(specs[name])),
        *source,
    ]


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.stride(0) * rows.element_size()


def _bits_of_pad(spec: BufferSpec) -> int:
    pad = torch.tensor([spec.pad], dtype=spec.dtype, device="cpu")
    return int(pad.view(_INTEGERS[pad.element_size()]).item())
