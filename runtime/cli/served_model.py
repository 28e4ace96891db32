"""The flags that say which model is served and how, with vLLM's spellings, and its service."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from .command import UserError, comma_separated, find_model, user_errors
from .device import add_device_flag
from .model_flags import add_kv_cache_flags
from .ranks import add_rank_flags, communicator_of, device_of, ranks_of

if TYPE_CHECKING:
    from ostinato.graphs import CaptureReport

    from ..parallel import Ranks
    from ..server import EngineThread, Service, Settings
    from ..server.loading import EngineLimits, EngineOptions, ServedModel

_AUTO, _NONE = "auto", "none"


def add_served_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a Hugging Face checkpoint, or its name on the Hub",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may give as model (default: MODEL)",
    )
    parser.add_argument(
        "--generation-config",
        choices=(_AUTO, _NONE),
        default=_AUTO,
        help="whether generation_config.json sets sampling defaults (default auto: it does)",
    )
    parser.add_argument(
        "--tool-call-parser",
        default=_AUTO,
        metavar="NAME",
        help="how texts are read for tool calls: hermes, json, or none (default: by the family)",
    )
    parser.add_argument(
        "--reasoning-parser",
        default=_AUTO,
        metavar="NAME",
        help="how texts are read for reasoning: think, or none (default: by the chat template)",
    )
    add_device_flag(parser)
    _add_engine_flags(parser.add_argument_group("engine"))


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        *("--max-batch", "--max-num-seqs"),
        type=int,
        metavar="N",
        help="texts that grow at once (default: the largest of --capture-sizes, or 32)",
    )
    group.add_argument(
        *("--max-context", "--max-model-len"),
        type=int,
        metavar="N",
        help="tokens of a prompt and its text (default: the model's)",
    )
    group.add_argument(
        *("--capture-sizes", "--cudagraph-capture-sizes"),
        type=comma_separated,
        nargs="+",
        metavar="B",
        help="batch sizes to capture, such as 1 2 4 or 1,2,4 (default: chosen up to --max-batch)",
    )
    group.add_argument(
        *("--memory-fraction", "--gpu-memory-utilization"),
        type=float,
        default=0.8,
        metavar="F",
        help="share of the GPU's memory, free once the model is loaded, that the KV cache may take "
        "(default 0.8)",
    )
    group.add_argument(
        *("--page-size", "--block-size"),
        type=int,
        default=16,
        metavar="N",
        help="tokens per KV page (default 16)",
    )
    group.add_argument(
        "--num-pages", type=int, metavar="N", help="pages of the KV cache, instead of a share"
    )
    group.add_argument(
        *("--max-prefill-tokens", "--max-num-batched-tokens"),
        type=int,
        default=8192,
        metavar="N",
        help="tokens of a step with prompts; a quarter of them beside as many texts (default 8192)",
    )
    add_kv_cache_flags(group)
    add_rank_flags(group)
    group.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare replays with the step after capture",
    )


def _require_server() -> None:
    """Check that what the server needs is installed."""
    try:
        importlib.import_module("..server", __package__)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'ostinato[serve]'") from error


def served_model_of(args: argparse.Namespace, folder: Path) -> ServedModel:
    """Return what the flags say of the model, beside its engine."""
    from ..server.loading import ServedModel

    return ServedModel(
        folder,
        tuple(args.served_model_name or [args.model]),
        own_defaults=args.generation_config == _AUTO,
        tools=args.tool_call_parser,
        reasoning=args.reasoning_parser,
    )


def engine_of(folder: Path, options: EngineOptions) -> tuple[EngineThread, EngineLimits]:
    """Return an engine, captured, in a thread of its own.

    Raises:
        UserError: for a checkpoint or an option that cannot be used.
    """
    from ..checkpoint import load_tokenizer
    from ..server.loading import start_engine

    with _engine_errors():
        return start_engine(folder, load_tokenizer(folder), options, _report)


def service_of(
    args: argparse.Namespace, folder: Path, settings: Settings, ranks: Ranks | None
) -> Service:
    """Return the service that the flags ask for, its engine captured, in this process.

    Raises:
        UserError: for a checkpoint or a flag that cannot be used.
    """
    from ..server.loading import load_service

    options = engine_options(args, ranks)
    with _engine_errors():
        return load_service(served_model_of(args, folder), options, settings, _report)


def _report(report: CaptureReport) -> None:
    print(report, file=sys.stderr, flush=True)


def _engine_errors() -> AbstractContextManager[None]:
    import torch

    return user_errors(ValueError, OSError, torch.OutOfMemoryError, MemoryError)


def run_served(
    args: argparse.Namespace, lead: Callable[[argparse.Namespace, Path, Ranks | None], int]
) -> int:
    """Run a command on a served model, and return its exit code.

    Args:
        args: of the command, with the flags of `add_served_model_flags`.
        lead: runs it in a process alone, or on rank 0, from the folder of the model; other ranks
            serve the requests that come to that one.

    Raises:
        UserError: where the model or the server is missing, or as `service_of`.
    """
    with ranks_of(args) as ranks:
        folder = find_model("MODEL", args.model, "tokenizer.json")
        _require_server()
        if ranks is None or ranks.leads:
            return lead(args, folder, ranks)
        _follow(args, folder, ranks)
        return 0


def _follow(args: argparse.Namespace, folder: Path, ranks: Ranks) -> None:
    from ..checkpoint import load_tokenizer
    from ..server.loading import load_engine

    options = engine_options(args, ranks)
    with _engine_errors():
        engine = load_engine(folder, load_tokenizer(folder), options)
    engine.follow()


def engine_options(args: argparse.Namespace, ranks: Ranks | None) -> EngineOptions:
    """Return the options of the engine that the flags ask for.

    Raises:
        UserError: for a flag that cannot be used.
    """
    from ..server.loading import EngineOptions

    sizes: Sequence[Sequence[int]] | None = args.capture_sizes
    with _engine_errors():
        device = device_of(args)
        return EngineOptions(
            device=device,
            max_batch=args.max_batch,
            max_context=args.max_context,
            page_size=args.page_size,
            num_pages=args.num_pages,
            memory_fraction=args.memory_fraction,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
            capture_sizes=None if sizes is None else [size for some in sizes for size in some],
            max_prefill_tokens=args.max_prefill_tokens,
            verify=args.verify,
            ranks=ranks,
            communicator=communicator_of(ranks, device),
        )
