"""The attention function and the mask that transformers calls under our name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import __version__ as version
from transformers.cache_utils import Cache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ... import ops
from ...ops.common.device import current_stream
from .cache import NAME

# Arguments of other attention functions that change the result: None or False here.
_NOT_BUILT = (
    *("output_attentions", "position_bias", "head_mask", "cache", "cu_seq_lens_q"),
    *("indices", "block_indices", "sinks"),  # of sparse attention, and of Inkling
)
_LEAST_TABLE = 512  # sequences of a page table that is kept; more make a larger one

_tables: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and stream


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with `ostinato.ops.paged_attention`, to each sequence's keys as one page.

    A sequence's T queries are its last tokens, also where a cache has room for more keys than it
    holds.

    Args:
        module: the layer; its `is_causal` counts where there is neither a mask nor `is_causal`.
        query: [batch, heads_q, T, dim] bf16, fp16 or fp32.
        key: [batch, heads_kv, places, dim] of query's dtype, with or without room for more.
        value: [batch, heads_kv, places, value_dim], else like key.
        attention_mask: what `lengths_mask` returned, or None for as many keys as there are places.
        dropout: 0.
        scaling: factor of q·k; None is 1/sqrt(dim).
        sliding_window: keys that a query sees, its own included; None for no limit.
        softcap: s > 0 turns each logit into s·tanh(logit / s).
        is_causal: hide the keys after a query's position, where there is no mask.
        s_aux: [heads_q], one more logit in each head's softmax denominator, without a value.
        seq_lens: [batch] int32, keys of each sequence, those of this call included, at most
            places; goes before what the mask says. The model's keyword of this name. None with a
            sliding window.
        others: what transformers passes on to every attention function.

    Returns:
        (out [batch, T, heads_q, value_dim], None).

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    if dropout != 0:
        raise ValueError(f"dropout: got {dropout!r}, expected 0: there is no dropout")
    for name in _NOT_BUILT:
        if (got := others.get(name)) is not None and got is not False:
            got = "a tensor" if isinstance(got, torch.Tensor) else repr(got)
            raise ValueError(f"{name}: got {got}, expected None with attention {NAME!r}")
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, s_aux)
    ):
        raise ValueError(
            "query, key, value: got a tensor that requires a gradient, expected none: there is no "
            "backward pass (torch.no_grad() says that none is wanted)"
        )
    batch, heads, tokens, dim = query.shape
    if key.ndim != 4 or key.size(0) != batch:
        raise ValueError(
            f"key: got shape {list(key.shape)}, expected [{batch}, heads_kv, places, {dim}]"
        )
    window = None if sliding_window is None else (sliding_window - 1, -1)
    if seq_lens is not None and sliding_window is not None:
        raise ValueError(
            "seq_lens: got a tensor for a layer with a sliding window, of which caches keep the "
            "last tokens only, expected None: a RaggedStaticCache has all of them"
        )
    starts = None
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
        if causal is None and seq_lens is None and 1 < tokens == key.size(2):
            # Encoders that transformers computes by its eager attention alone say nothing of it.
            raise ValueError(
                f"is_causal: got None from {type(module).__name__}, expected a bool where there is "
                f"no mask, for attention {NAME!r}"
            )
        causal = causal is not False
        if seq_lens is None:
            if causal and 1 < tokens != key.size(2):
                raise ValueError(
                    f"attention_mask: got None for {tokens} queries and {key.size(2)} keys, "
                    "expected what lengths_mask returns, or seq_lens"
                )
            seq_lens = torch.full((batch,), key.size(2), dtype=torch.int32, device=key.device)
    else:
        causal = True
        _check_mask(attention_mask, batch, sliding_window)
        if attention_mask.size(1) == 2:
            starts = attention_mask[:, 1, 0, 0]
            if seq_lens is not None:
                raise ValueError(
                    "seq_lens: got a tensor with an attention_mask that has padding, expected one "
                    "of the two"
                )
        if seq_lens is None:
            seq_lens = attention_mask[:, 0, 0, 0].contiguous()
    if sliding_window is not None and not causal:
        raise ValueError(
            f"sliding_window: got {sliding_window} where each query sees every key, expected None"
        )
    if starts is None:
        pages = key.transpose(1, 2), value.transpose(1, 2), _page_table(batch, query.device)
    else:
        pages = _pages_of_one(key, value, starts)
    out = ops.paged_attention(
        query.transpose(1, 2).reshape(batch * tokens, heads, dim),
        *pages,
        seq_lens,
        max_seqlen_q=max(tokens, 1),
        scale=scaling,
        causal=causal,
        window=window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    assert isinstance(out, torch.Tensor), "return_lse is not asked for"
    return out.view(batch, tokens, heads, value.size(3)), None


def lengths_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """Return how many keys each sequence has, as the mask that `attention` takes.

    Args:
        batch_size: sequences.
        q_length: queries of each.
        kv_length: places for keys that the layers will be given.
        q_offset: position of the first query, where the cache counts on the device a tensor there,
            of one number or of [batch].
        kv_offset: position of the first key.
        mask_function: transformers' rule of what a query sees: causal, with a sliding window or
            without, or everything.
        attention_mask: [batch, tokens] bool, False for padding, which comes first in a sequence;
            it is read on the host. None for no padding.
        local_size: the sliding window, in keys.
        use_vmap: whether the rule is one of the caller's.
        device: of the result.

    Returns:
        [batch, 1 or 2, 1, window] int32: each sequence's length, and where it begins if there is
        padding, in every place, with a window of 1 for no limit: transformers hands on what has
        four dimensions as it is. None where each query sees every key.

    Raises:
        ValueError: for another rule, or a mask with padding elsewhere.
    """
    windowed = local_size is not None and _is_sliding(mask_function, local_size)
    everything = mask_function is bidirectional_mask_function
    if use_vmap or not (windowed or everything or mask_function is causal_mask_function):
        raise ValueError(
            f"mask_function: got {getattr(mask_function, '__qualname__', mask_function)}, expected "
            f"causal attention, with a sliding window or without, for attention {NAME!r}: not "
            "packed, chunked or blockwise"
        )
    starts = None
    if attention_mask is not None:
        if isinstance(q_offset, torch.Tensor) and q_offset.ndim:
            raise ValueError(
                "attention_mask: got a tensor with rows of a RaggedStaticCache, expected None"
            )
        if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "attention_mask: got a tensor in a captured step, expected None, and seq_lens or a "
                "RaggedStaticCache: a mask of tokens is read on the host"
            )
        seen = kv_length if everything else int(q_offset) + q_length
        starts = _padding(attention_mask, kv_offset, seen, may_pad=not everything)
    if everything:
        return None
    length = q_offset + (q_length - kv_offset)
    if isinstance(length, torch.Tensor):
        lengths = length.to(device=device, dtype=torch.int32).expand(batch_size)
    else:
        lengths = torch.full((batch_size,), length, dtype=torch.int32, device=device)
    if starts is None:
        mask = lengths.contiguous().view(-1, 1, 1, 1)
    else:
        mask = torch.stack([lengths - starts, starts], dim=1)[:, :, None, None]
    return mask.expand(-1, -1, 1, local_size if windowed and local_size is not None else 1)


def _padding(mask: torch.Tensor, kv_offset: int, seen: int, may_pad: bool) -> torch.Tensor | None:
    """Return [batch] int32, where sequences begin behind their padding, None without any.

    Args:
        mask: [batch, tokens] bool.
        kv_offset: the position that is counted from.
        seen: positions up to the last query's.
        may_pad: whether there may be padding.
    """
    if mask.ndim != 2 or mask.size(1) < seen:
        raise ValueError(
            f"attention_mask: got shape {list(mask.shape)}, expected [batch, at least {seen}] for "
            f"attention {NAME!r}"
        )
    mask = mask[:, kv_offset:seen]
    if bool(mask.all()):
        return None
    starts = mask.logical_not().sum(1, dtype=torch.int32)
    behind = torch.arange(mask.size(1), device=mask.device) >= starts.unsqueeze(1)
    if not may_pad or not torch.equal(mask, behind):
        where = "after tokens" if may_pad else "where each query sees every key"
        raise ValueError(
            f"attention_mask: got padding {where}, expected none there with attention {NAME!r}: "
            "it takes padding before a sequence's first token"
        )
    return starts


def _is_sliding(rule: Callable[..., Any], window: int) -> bool:
    """Return whether a mask function is transformers' causal one of a sliding window."""
    parts = getclosurevars(rule).nonlocals.get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return False
    given = getclosurevars(parts[0]).nonlocals
    return parts[0].__qualname__.startswith("sliding_window_overlay.") and given == {
        "sliding_window": window
    }


def _check_mask(mask: torch.Tensor, batch: int, sliding_window: int | None) -> None:
    """Refuse any mask but one that `lengths_mask` made for layers with this window."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask: got {type(mask).__name__}, expected a tensor or None")
    shape = mask.shape
    if mask.dtype is not torch.int32 or mask.ndim != 4 or shape[0] != batch or shape[2] != 1:
        raise ValueError(
            f"attention_mask: got {mask.dtype} of shape {list(shape)}, expected what lengths_mask "
            f"returns: int32 [{batch}, 1 or 2, 1, window]; no mask and seq_lens, or a "
            "RaggedStaticCache, where sequences have lengths of their own"
        )
    window = shape[3]
    if window != (1 if sliding_window is None else sliding_window):
        expected = None if window == 1 else window
        raise ValueError(
            f"sliding_window: got {sliding_window}, expected that of the mask, {expected}"
        )


def _pages_of_one(
    key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values as pages of one token, and a table that begins behind the padding.

    Args:
        key: [batch, heads_kv, places, dim].
        value: likewise.
        starts: [batch] int32, places of padding.
    """
    batch, _, places, _ = key.shape
    between = _places_between(key)
    if between is None or between != _places_between(value):
        key, value = key.contiguous(), value.contiguous()
        between = key.size(1) * places
    steps = torch.arange(places, dtype=torch.int32, device=key.device)
    first = torch.arange(batch, dtype=torch.int32, device=key.device) * between + starts
    k_pages, v_pages = (
        x.as_strided(
            ((batch - 1) * between + places, 1, x.size(1), x.size(3)),
            (x.stride(2), x.stride(2), x.stride(1), x.stride(3)),
        )
        for x in (key, value)
    )
    return k_pages, v_pages, first.unsqueeze(1) + steps


def _places_between(x: torch.Tensor) -> int | None:
    """Return how many strides of a place lie between two sequences, None if no whole number."""
    sequence, place = x.stride(0), x.stride(2)
    return None if place == 0 or sequence % place else sequence // place


def _page_table(batch: int, device: torch.device) -> torch.Tensor:
    """Return [batch, 1] int32 in which each sequence is the page of its number.

    It is made once for each stream, as workspaces are: a graph, whose warm-up made it on a stream
    of its own, holds its address, and knows whose it is.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
    index = device.index if device.index is not None else torch.cuda.current_device()
    place = (device, current_stream(index))
    table = _tables.get(place)
    if table is None or table.size(0) < batch:
        size = max(batch, _LEAST_TABLE)
        table = torch.arange(size, dtype=torch.int32, device=device).unsqueeze(1)
        # What a capture makes is filled by its replays alone.
        if not torch.cuda.is_current_stream_capturing():
            if place in _tables:
                _outgrown.append(_tables[place])
            _tables[place] = table
    return table[:batch]


_outgrown: list[torch.Tensor] = []  # a captured graph may hold one

if not hasattr(Cache, "get_query_offset"):  # masks were made of other arguments
    raise ImportError(f"transformers: got {version}, expected at least 5.14")
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lengths_mask)
