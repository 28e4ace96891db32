"""What requests ask for beyond `sample`: a mask of tokens, additions, and penalties by count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import Variant
from ..common import checks, pdl
from ..common.device import current_stream, has_kernel, on_device
from ..common.torch_library import register

_WORD = 32  # tokens in a word of a mask


@dataclass(frozen=True, kw_only=True)
class ProcessLogits(Variant):
    """The kernel: fp32 logits processed row by row."""

    family: ClassVar[str] = "process_logits"
    source: ClassVar[Path] = CSRC / "process_logits" / "process_logits.cu"
    needs: ClassVar[frozenset[str]] = frozenset()
    dtype: ClassVar[str] = "fp32"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def defines(self) -> dict[str, str]:
        return {}


register_family(ProcessLogits, [ProcessLogits()])


@dataclass(frozen=True)
class LogitsTables:
    """What each slot's request asks of its logits: tensors with a row per slot, S in all.

    Attributes:
        frequency: [S] fp32, subtracted from a token's logit each time that it was generated.
        presence: [S] fp32, subtracted once from every token that was generated.
        history: [S, L] int32, L >= 1: the tokens that a request has generated, if it has one of
            these two; `process_logits` adds the last of them.
        edits: [S] int32, 0 to E: how many of the next three count.
        edit_ids: [S, E] int32, E >= 1: tokens; each at most twice in a row.
        edit_values: [S, E] fp32, added to their logits; -inf forbids the token.
        edit_ends: [S, E] int64: only while fewer tokens than this have been generated.
        masked: [S] int32, whether the mask counts: 0 or 1.
        mask: [S, ceil(V / 32)] int32: bit i % 32 of word i / 32 is 1 where token i is allowed, as
            xgrammar has it.
    """

    frequency: torch.Tensor
    presence: torch.Tensor
    history: torch.Tensor
    edits: torch.Tensor
    edit_ids: torch.Tensor
    edit_values: torch.Tensor
    edit_ends: torch.Tensor
    masked: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def neutral(
        cls, slots: int, vocabulary: int, history: int, edits: int, device: torch.device
    ) -> LogitsTables:
        """Return tables of slots that ask for nothing, with room for so many tokens and edits."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        return cls(
            frequency=zeros(torch.float32),
            presence=zeros(torch.float32),
            history=zeros(torch.int32, history),
            edits=zeros(torch.int32),
            edit_ids=zeros(torch.int32, edits),
            edit_values=zeros(torch.float32, edits),
            edit_ends=zeros(torch.int64, edits),
            masked=zeros(torch.int32),
            mask=zeros(torch.int32, mask_words(vocabulary)),
        )


def mask_words(vocabulary: int) -> int:
    """Return the 32-bit words of a mask of so many tokens."""
    return -(-vocabulary // _WORD)


def process_logits(
    logits: torch.Tensor,
    tables: LogitsTables,
    *,
    slots: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor,
    repetition_penalty: torch.Tensor,
    seen: torch.Tensor,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Return logits to sample from, [B, V] fp32; `logits` stay as they are.

    In this order, that of vLLM: tokens that the mask does not allow get -inf; edits are added;
    the repetition penalty divides the positive and multiplies the negative logits of tokens that
    are `seen`; the frequency penalty is subtracted as often as a token was generated, the presence
    penalty once. What a row does not ask for leaves its bits as they are, and so does NaN. Counts
    are made anew from the history in each call, which can be repeated.

    On a GPU, from sm_80 on, this is one launch.

    Args:
        logits: [B, V] fp32, V >= 1.
        tables: of S slots; `history` is written.
        slots: [B] int64 in 0 .. S - 1, all different where they count tokens.
        counters: [B] int64, how many tokens each request has generated.
        tokens: [B] int64, the last of these; written at `history[slot, counter - 1]` for rows with
            a frequency or presence penalty.
        repetition_penalty: [B] fp32 > 0; 1 changes nothing.
        seen: [S, V] bool: tokens of prompt and text.
        out: [B, V] fp32, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("logits", logits, (torch.float32,), ("B", "V"))
    checks.not_empty("logits", logits, "V")
    checks.int32_sizes("logits", logits.shape, "B", "V")
    device, (rows, vocabulary) = logits.device, logits.shape
    if not isinstance(tables, LogitsTables):
        raise TypeError(f"tables: got {type(tables).__name__}, expected LogitsTables")
    _check_tables(tables, vocabulary, device)
    for name, value in (("slots", slots), ("counters", counters), ("tokens", tokens)):
        checks.tensor(name, value, (torch.int64,), (rows,), device)
    checks.tensor("repetition_penalty", repetition_penalty, (torch.float32,), (rows,), device)
    checks.tensor("seen", seen, (torch.bool,), (tables.edits.size(0), vocabulary), device)
    if out is not None:
        checks.output("out", out, (torch.float32,), logits.shape, device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=device)
        _process_logits_op(
            logits,
            slots,
            counters,
            tokens,
            repetition_penalty,
            seen,
            tables.frequency,
            tables.presence,
            tables.edits,
            tables.edit_ids,
            tables.edit_values,
            tables.edit_ends,
            tables.masked,
            tables.mask,
            tables.history,
            out,
        )
    return out


def _check_tables(tables: LogitsTables, vocabulary: int, device: torch.device) -> None:
    checks.tensor("tables.edits", tables.edits, (torch.int32,), ("S",), device)
    slots = tables.edits.size(0)
    shapes = {
        "frequency": (torch.float32, (slots,)),
        "presence": (torch.float32, (slots,)),
        "history": (torch.int32, (slots, "L")),
        "edit_ids": (torch.int32, (slots, "E")),
        "edit_values": (torch.float32, (slots, "E")),
        "edit_ends": (torch.int64, (slots, "E")),
        "masked": (torch.int32, (slots,)),
        "mask": (torch.int32, (slots, mask_words(vocabulary))),
    }
    for name, (dtype, shape) in shapes.items():
        value = getattr(tables, name)
        checks.tensor(f"tables.{name}", value, (dtype,), shape, device)
        if not value.is_contiguous():
            raise ValueError(
                f"tables.{name}: got strides {list(value.stride())}, expected dense rows"
            )
    checks.not_empty("tables.history", tables.history, "L")
    checks.writable("tables.history", tables.history)
    checks.not_empty("tables.edit_ids", tables.edit_ids, "E")
    edits = tables.edit_ids.size(1)
    for name in ("edit_values", "edit_ends"):
        if getattr(tables, name).size(1) != edits:
            size = getattr(tables, name).size(1)
            raise ValueError(f"tables.{name}: got E = {size}, expected {edits}")


def _process_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor,
    repetition_penalty: torch.Tensor,
    seen: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    edits: torch.Tensor,
    edit_ids: torch.Tensor,
    edit_values: torch.Tensor,
    edit_ends: torch.Tensor,
    masked: torch.Tensor,
    mask: torch.Tensor,
    history: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if logits.size(0) == 0:
        return
    if has_kernel(ProcessLogits, logits):
        device = logits.get_device()
        with on_device(device):
            stream = current_stream(device)
            load(ProcessLogits(), device=device, stream=stream).launch(
                logits=logits.data_ptr(),
                logits_stride=logits.stride(0),
                slots=slots.data_ptr(),
                counters=counters.data_ptr(),
                tokens=tokens.data_ptr(),
                repetition_penalty=repetition_penalty.data_ptr(),
                seen=seen.data_ptr(),
                seen_stride=seen.stride(0),
                frequency=frequency.data_ptr(),
                presence=presence.data_ptr(),
                history=history.data_ptr(),
                edits=edits.data_ptr(),
                edit_ids=edit_ids.data_ptr(),
                edit_values=edit_values.data_ptr(),
                edit_ends=edit_ends.data_ptr(),
                masked=masked.data_ptr(),
                mask=mask.data_ptr(),
                out=out.data_ptr(),
                out_stride=out.stride(0),
                history_size=history.size(1),
                most_edits=edit_ids.size(1),
                mask_words=mask.size(1),
                rows=logits.size(0),
                vocabulary=logits.size(1),
                pdl=pdl.enabled(),
                stream=stream,
            )
        return
    vocabulary = logits.size(1)
    place = torch.arange(vocabulary, device=logits.device)
    allowed = (mask[slots][:, place // _WORD] >> (place % _WORD)) & 1 != 0
    forbidden = ~allowed & (masked[slots] != 0)[:, None] & ~logits.isnan()
    result = torch.where(forbidden, -torch.inf, logits)

    column = torch.arange(edit_ids.size(1), device=logits.device)
    counts_now = (column < edits[slots, None]) & (counters[:, None] < edit_ends[slots])
    additions = torch.zeros_like(result).scatter_add_(
        1, edit_ids[slots].long(), torch.where(counts_now, edit_values[slots], 0.0)
    )
    result = torch.where((additions == 0) | result.isnan(), result, _sum(result, additions))

    penalty = repetition_penalty[:, None]
    penalized = torch.where(result > 0, result / penalty, result * penalty)
    result = torch.where(seen[slots] & (penalty != 1), penalized, result)

    counts = _counts(logits, slots, counters, tokens, frequency, presence, history)
    less = result - frequency[slots, None] * counts - presence[slots, None]
    torch.where(counts > 0, less, result, out=out)


def _sum(logits: torch.Tensor, additions: torch.Tensor) -> torch.Tensor:
    return torch.where(additions == -torch.inf, additions, logits + additions)


def _counts(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:
    """Note the last tokens of rows that count theirs, and return all counts [B, V], in fp32."""
    size = history.size(1)
    counts_any = (frequency[slots] != 0) | (presence[slots] != 0)
    generated = torch.where(counts_any, counters.clamp(0, size), 0)[:, None]
    index = torch.arange(size, device=logits.device)
    rows = torch.where(index == generated - 1, tokens[:, None].int(), history[slots])
    # Rows that count nothing may share a slot, and write nothing.
    flat = (slots[:, None] * size + generated - 1)[generated > 0]
    history.view(-1).index_put_((flat,), tokens[:, None][generated > 0].int())
    present = (index < generated).float()
    return torch.zeros_like(logits).scatter_add_(1, rows.long(), present)


_process_logits_op = register(
    "process_logits(Tensor logits, Tensor slots, Tensor counters, Tensor tokens, "
    "Tensor repetition_penalty, Tensor seen, Tensor frequency, Tensor presence, Tensor edits, "
    "Tensor edit_ids, Tensor edit_values, Tensor edit_ends, Tensor masked, Tensor mask, "
    "Tensor(a!) history, Tensor(b!) out) -> ()",
    _process_logits,
)
