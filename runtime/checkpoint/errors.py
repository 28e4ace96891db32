"""What is raised when a checkpoint folder cannot be used."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged or contradicts itself; the message names the file."""


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint is in a format that this runtime does not implement."""
