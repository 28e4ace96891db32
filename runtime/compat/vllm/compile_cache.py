"""Keeps vLLM from taking a compiled model of its cache that was traced without the plug-in.

Such a model multiplies by vLLM's own ops, which cannot read packed weights. vLLM finds it by a hash
of its configuration and its environment variables, before it traces anything.
"""

from __future__ import annotations

from vllm import envs

from ... import __version__

FACTOR = "OSTINATO_PLUGIN"


def register() -> None:
    """Make the plug-in and its version part of that hash, as a variable of the environment is."""
    envs.environment_variables[FACTOR] = lambda: __version__
