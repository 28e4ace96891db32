"""Loads a checkpoint into a service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ostinato.graphs import CaptureReport
from ostinato.graphs.buckets import check_batch_sizes

from ..checkpoint import load_config, load_model, load_tokenizer
from ..engine import Engine
from ..engine.cache_size import MEMORY_FRACTION, check_memory_fraction
from ..models import ScaleKind
from ..ops import Communicator
from ..parallel import Ranks
from .chat.parsers import AUTO, Parsers
from .chat.templates import load_chat_template
from .defaults import generation_defaults
from .engine_thread import EngineThread
from .jobs import EngineLink
from .service import Service
from .settings import Settings

_MAX_BATCH = 32


@dataclass(frozen=True)
class EngineOptions:
    """How the engine of a service is made; see `Engine`, whose defaults these are.

    Args:
        device: of the model.
        max_batch: texts that run at once; by default the largest of `capture_sizes`, or 32.
        max_context: longest prompt plus text; by default the model's.
        page_size: tokens per KV page.
        num_pages: of the KV cache; by default what `memory_fraction` allows, if so many are of use.
        memory_fraction: of a GPU's free memory that the KV cache may take.
        kv_cache_dtype, kv_scales: of the KV cache.
        capture_sizes: batch sizes to capture; by default chosen up to `max_batch`.
        max_prefill_tokens: tokens of one step with prompts; a quarter of them beside as many texts.
        verify: whether replays are compared with the step after capture.
        progress: whether capture shows its progress.
        ranks: the processes that serve the model, with `communicator`; None for this one alone.
        communicator: between their models.
    """

    device: torch.device
    max_batch: int | None = None
    max_context: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float = MEMORY_FRACTION
    kv_cache_dtype: str = "auto"
    kv_scales: ScaleKind | None = None
    capture_sizes: Sequence[int] | None = None
    max_prefill_tokens: int = 8192
    verify: bool = True
    progress: bool = True
    ranks: Ranks | None = None
    communicator: Communicator | None = None

    def __post_init__(self) -> None:
        # Before the model is loaded.
        check_memory_fraction(self.memory_fraction)
        if self.capture_sizes is not None:
            check_batch_sizes(self.capture_sizes, self.most, "capture_sizes")

    @property
    def most(self) -> int:
        """Texts that run at once."""
        # At least 1, so that it is the sizes, if they are wrong, that the error is about.
        if self.max_batch is not None:
            return self.max_batch
        return max([1, *(self.capture_sizes or [_MAX_BATCH])])


def load_engine(folder: Path, tokenizer: Tokenizer, options: EngineOptions) -> Engine:
    """Load a checkpoint, or this rank's share of it, into an engine, nothing captured yet.

    Args:
        folder: of the checkpoint.
        tokenizer: of it.
        options: of the engine.

    Raises:
        ValueError, OSError, torch.OutOfMemoryError: when the checkpoint or an option is no good.
    """
    model = load_model(
        folder,
        device=options.device,
        max_context=options.max_context,
        communicator=options.communicator,
    )
    return Engine(
        model,
        tokenizer,
        max_batch=options.most,
        max_context=options.max_context or model.max_context,
        page_size=options.page_size,
        num_pages=options.num_pages,
        memory_fraction=options.memory_fraction,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_scales=options.kv_scales,
        max_prefill_tokens=options.max_prefill_tokens,
        logits_processing=True,
        ranks=options.ranks,
    )


@dataclass(frozen=True)
class ServedModel:
    """What a server needs of a checkpoint beside its engine.

    Args:
        folder: of the checkpoint.
        names: that requests may give as `model`.
        own_defaults: whether generation_config.json sets sampling defaults.
        tools: name of the parser of tool calls; see `Parsers.named`.
        reasoning: name of the parser of reasoning.
    """

    folder: Path
    names: tuple[str, ...]
    own_defaults: bool = True
    tools: str = AUTO
    reasoning: str = AUTO

    def service(
        self, tokenizer: Tokenizer, settings: Settings
    ) -> Callable[[EngineLink, EngineLimits], Service]:
        """Read the checkpoint, and return what makes the service of an engine.

        Args:
            tokenizer: of the checkpoint.
            settings: of the server.

        Raises:
            ValueError, OSError: when the checkpoint or an option is no good.
        """
        config = load_config(self.folder)
        template = load_chat_template(self.folder, settings.template_timeout)
        defaults = generation_defaults(self.folder) if self.own_defaults else {}
        text = "" if template is None else template.text
        parsers = Parsers.named(self.tools, self.reasoning, family=config.family, template=text)
        return lambda engine, limits: Service(
            engine=engine,
            tokenizer=tokenizer,
            models=self.names,
            max_context=limits.max_context,
            max_batch=limits.max_batch,
            settings=settings,
            defaults=defaults,
            template=template,
            parsers=parsers,
        )


@dataclass(frozen=True)
class EngineLimits:
    """Of an engine: its longest prompt plus text, and the texts that run at once."""

    max_context: int
    max_batch: int


def start_engine(
    folder: Path,
    tokenizer: Tokenizer,
    options: EngineOptions,
    on_capture: Callable[[CaptureReport], None] = lambda report: None,
) -> tuple[EngineThread, EngineLimits]:
    """Load a checkpoint and capture its engine in a thread of its own, which then waits for jobs.

    Args:
        folder: of the checkpoint.
        tokenizer: of it.
        options: of the engine.
        on_capture: gets the report.

    Raises:
        ValueError, OSError, torch.OutOfMemoryError: when the checkpoint or an option is no good.
    """

    def make_engine() -> Engine:
        engine = load_engine(folder, tokenizer, options)
        on_capture(
            engine.capture(options.capture_sizes, progress=options.progress, verify=options.verify)
        )
        return engine

    thread = EngineThread(make_engine)
    if options.ranks is not None:
        options.ranks.on_failure(thread.abandon)
    engine = thread.start()
    return thread, EngineLimits(engine.max_context, options.most)


def load_service(
    model: ServedModel,
    options: EngineOptions,
    settings: Settings,
    on_capture: Callable[[CaptureReport], None] = lambda report: None,
) -> Service:
    """Return the service of a model whose engine is captured, in a thread of this process.

    Args:
        model: the checkpoint.
        options: of the engine.
        settings: of the server.
        on_capture: gets the report.

    Raises:
        ValueError, OSError, torch.OutOfMemoryError: when the checkpoint or an option is no good.
    """
    tokenizer = load_tokenizer(model.folder)
    service = model.service(tokenizer, settings)
    return service(*start_engine(model.folder, tokenizer, options, on_capture))
