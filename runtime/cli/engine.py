"""The flags that size an engine, and the engine of that size."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .command import UserError, comma_separated, user_errors
from .device import add_device_flag
from .model_flags import add_kv_cache_flags, add_page_size_flag
from .ranks import add_rank_flags, communicator_of, device_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from tokenizers import Tokenizer

    from ..engine import Engine, SamplingParams
    from ..parallel import Ranks

_MAX_BATCH = 32
_SIZES = "the sizes of the engine"


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
    add_rank_flags(group)
    group.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare replays with the step after capture",
    )


@dataclass(frozen=True)
class _Sizes:
    """What follows from the prompts, which rank 0 alone reads."""

    max_batch: int
    max_context: int
    logits_processing: bool


def make_engine(
    args: argparse.Namespace,
    folder: Path,
    prompts: Sequence[str],
    params: SamplingParams,
    ranks: Ranks | None = None,
) -> tuple[Engine, list[list[int]]]:
    """Return an engine of just the size that the prompts need, and their tokens.

    It serves what `params` ask for; all prompts ask for the same. The other `ranks` make one by
    `follow_engine`.

    Raises:
        UserError, ValueError, OSError: for a checkpoint or a flag that cannot be used.
    """
    from ..checkpoint import load_config, load_tokenizer

    device = device_of(args)
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
    sizes = _Sizes(max_batch, max_context, bool(params.processed_fields))
    if ranks is not None:
        ranks.share(_SIZES, asdict(sizes))
    return _engine(args, folder, device, tokenizer, sizes, ranks), tokens


def follow_engine(args: argparse.Namespace, folder: Path, ranks: Ranks) -> None:
    """Make the engine of another rank than 0, and serve rank 0's prompts until that one ends.

    Raises:
        UserError, ValueError, OSError: as `make_engine`.
    """
    from ..checkpoint import load_tokenizer

    sizes = _Sizes(**ranks.share(_SIZES, None))
    _engine(args, folder, device_of(args), load_tokenizer(folder), sizes, ranks).follow()


def _engine(
    args: argparse.Namespace,
    folder: Path,
    device: torch.device,
    tokenizer: Tokenizer,
    sizes: _Sizes,
    ranks: Ranks | None,
) -> Engine:
    import torch

    from ..checkpoint import load_model
    from ..engine import Engine

    with user_errors(ValueError, OSError, torch.OutOfMemoryError):
        model = load_model(
            folder,
            device=device,
            max_context=sizes.max_context,
            communicator=communicator_of(ranks, device),
        )
    # torch says RuntimeError when there is no memory for so many pages.
    with user_errors(ValueError, RuntimeError, MemoryError):
        return Engine(
            model,
            tokenizer,
            max_batch=sizes.max_batch,
            max_context=sizes.max_context,
            page_size=args.page_size,
            num_pages=args.num_pages,
            logits_processing=sizes.logits_processing,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
            ranks=ranks,
        )
