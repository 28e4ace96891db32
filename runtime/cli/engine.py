"""The flags that size an engine, and the engine of that size."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .command import UserError, comma_separated, user_errors
from .device import add_device_flag, resolve_device
from .model_flags import add_kv_cache_flags, add_page_size_flag

if TYPE_CHECKING:
    from pathlib import Path

    from ..engine import Engine, SamplingParams

_MAX_BATCH = 32


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; sizes that are not given follow from the prompts."""
    add_device_flag(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--batch-sizes",
        type=comma_separated,
        metavar="B,...",
        help="batch sizes to capture, such as 1,2,4 (default: chosen up to --max-batch)",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help="texts that grow at once (default: the largest of --batch-sizes, or the number of "
        f"prompts up to {_MAX_BATCH})",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens of a prompt and its text (default: what the prompts need)",
    )
    add_page_size_flag(group)
    group.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="pages of the KV cache (default: enough, as far as memory allows)",
    )
    add_kv_cache_flags(group)
    group.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare replays with the step after capture",
    )


def make_engine(
    args: argparse.Namespace, folder: Path, prompts: Sequence[str], params: SamplingParams
) -> tuple[Engine, list[list[int]]]:
    """Return an engine of just the size that the prompts need, and their tokens.

    It serves what `params` ask for; all prompts ask for the same.

    Raises:
        UserError, ValueError, OSError: for a checkpoint or a flag that cannot be used.
    """
    import torch

    from ..checkpoint import load_config, load_model, load_tokenizer
    from ..engine import Engine

    device = resolve_device(args.device)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    tokens = [tokenizer.encode(prompt).ids for prompt in prompts]
    # Here, because sizes that follow from such a prompt would be refused instead of it.
    if [] in tokens:
        number = tokens.index([]) + 1
        raise UserError(f"prompt {number}: got no tokens, expected at least one")
    max_context, own = args.max_context, config.max_position_embeddings
    if max_context is None:
        max_context = min(max(map(len, tokens)) + params.max_tokens, own)
    # Here, because the model is loaded for this context, which then counts as its own.
    elif not 2 <= max_context <= config.longest_context:
        longest = config.longest_context
        raise UserError(f"max_context: got {max_context}, expected 2 to the model's {longest}")
    max_batch = args.max_batch
    if max_batch is None:
        # At least 1, so that it is the sizes, if they are wrong, that the error is about.
        max_batch = max([1, *(args.batch_sizes or [min(len(prompts), _MAX_BATCH)])])
    with user_errors(ValueError, OSError, torch.OutOfMemoryError):
        model = load_model(folder, device=device, max_context=max_context)
    # torch says RuntimeError when there is no memory for so many pages.
    with user_errors(ValueError, RuntimeError, MemoryError):
        engine = Engine(
            model,
            tokenizer,
            max_batch=max_batch,
            max_context=max_context,
            page_size=args.page_size,
            num_pages=args.num_pages,
            logits_processing=bool(params.processed_fields),
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
        )
    return engine, tokens
