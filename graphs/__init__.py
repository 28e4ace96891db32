"""Capture any step function once per batch size, and replay it.

`GraphRunner` takes a step and the `StaticBuffers` it reads. It warms the step up, captures it as
CUDA graphs in one memory pool, verifies that replays equal the step bit for bit, and then serves
every batch from the smallest captured size that holds it. Without CUDA it does the same with the
step itself. This package knows nothing of models: only torch is needed. See `docs/graphs.md`.
"""

from ostinato.graphs.audit import Finding
from ostinato.graphs.buckets import default_batch_sizes
from ostinato.graphs.buffers import BatchView, StaticBuffers
from ostinato.graphs.burst import Burst
from ostinato.graphs.burst_rules import Add, BurstRules, Feed, Slot
from ostinato.graphs.diagnosis import Diagnosis
from ostinato.graphs.errors import (
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
from ostinato.graphs.histogram import Histogram
from ostinato.graphs.keys import Key, Variant
from ostinato.graphs.outputs import Step, StepOutput
from ostinato.graphs.plan import Misses
from ostinato.graphs.report import CaptureReport, GraphReport
from ostinato.graphs.runner import GraphRunner
from ostinato.graphs.spec import BufferSpec
from ostinato.graphs.stats import BucketStats, RunnerStats

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
