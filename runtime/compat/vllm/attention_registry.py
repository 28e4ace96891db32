"""The name under which vLLM finds our attention: `--attention-backend CUSTOM`."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

PATH = f"{__package__}.attention_backend.OstinatoAttentionBackend"


def register() -> None:
    """Register the path of the backend, which vLLM imports when it is chosen."""
    register_backend(AttentionBackendEnum.CUSTOM, PATH)
