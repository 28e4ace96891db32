"""Which vLLM the adapters are for."""

from __future__ import annotations

from importlib import metadata

from ... import __version__

TESTED = "0.33"


def found_version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        ImportError: when there is none.
    """
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise ImportError(f"vllm: not installed, expected vLLM {TESTED}") from None


def is_tested(found: str) -> bool:
    """Return whether a version, such as 0.33.0+cu130, is one that the adapters are tested with."""
    return found.split("+")[0].split(".")[:2] == TESTED.split(".")


def check_version(found: str) -> bool:
    """Say in vLLM's log which versions met, and return whether the adapters fit."""
    from vllm.logger import init_logger

    # vLLM prints loggers below its own name alone.
    logger = init_logger("vllm.ostinato")
    if is_tested(found):
        logger.info("Ostinato %s: plug-in registered, vLLM %s found", __version__, found)
        return True
    logger.warning(
        "Ostinato %s: nothing is registered, vLLM %s found, expected %s",
        __version__,
        found,
        TESTED,
    )
    return False
