"""Capture any step function once per batch size, and replay it.

`GraphRunner` takes a step and the `StaticBuffers` it reads. It warms the step up, captures it as
CUDA graphs in one memory pool, verifies that replays equal the step bit for bit, and then serves
every batch from the smallest captured size that holds it. Without CUDA it does the same with the
step itself. This package knows nothing of models: only torch is needed. See `docs/graphs/index.md`.
"""

from .buckets import default_batch_sizes
from .buffer_spec import BufferSpec
from .buffers import BatchView, StaticBuffers
from .capture_plan import Misses
from .errors import (
    AsleepError,
    AuditError,
    BurstError,
    BusyError,
    CaptureError,
    ClosedError,
    ForkedError,
    GraphError,
    InvalidatedError,
    NotCapturedError,
    RankError,
    VerificationError,
)
from .failures import Diagnosis
from .graph_key import Key, Variant
from .inspect.audit import Finding
from .loop.burst import Burst
from .loop.rules import Add, BurstRules, Feed, Slot
from .metrics.histogram import Histogram
from .metrics.stats import BucketStats, RunnerStats
from .outputs import Step, StepOutput
from .report import CaptureReport, GraphReport
from .runner import GraphRunner

__all__ = [
    "Add",
    "AsleepError",
    "AuditError",
    "BatchView",
    "BucketStats",
    "BufferSpec",
    "Burst",
    "BurstError",
    "BurstRules",
    "BusyError",
    "CaptureError",
    "CaptureReport",
    "ClosedError",
    "Diagnosis",
    "Feed",
    "Finding",
    "ForkedError",
    "GraphError",
    "GraphReport",
    "GraphRunner",
    "Histogram",
    "InvalidatedError",
    "Key",
    "Misses",
    "NotCapturedError",
    "RankError",
    "RunnerStats",
    "Slot",
    "StaticBuffers",
    "Step",
    "StepOutput",
    "Variant",
    "VerificationError",
    "default_batch_sizes",
]
