"""Which GPUs the adapters are chosen on."""

from __future__ import annotations

from vllm.platforms import current_platform

from ...jit.variant import Variant

Answer = tuple[bool, str | None]


def runs_on(family: type[Variant], compute_capability: int | None) -> Answer:
    """Return whether a GPU has kernels of a family, and else why not, as vLLM asks kernels.

    Elsewhere the ops run on torch's operators, which are no reason to leave vLLM's own kernels.

    Args:
        family: of kernels.
        compute_capability: 90 for sm_90; None is that of vLLM's current platform.
    """
    if compute_capability is None:
        found = current_platform.get_device_capability()
        if found is None:
            return False, "needs a CUDA GPU"
        compute_capability = found.to_int()
    major, minor = divmod(compute_capability, 10)
    if family.supports((major, minor)):
        return True, None
    return False, f"has no kernels for compute capability {major}.{minor}"
