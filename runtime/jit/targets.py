"""The GPUs that kernels are compiled for: one table, and which of its rows a device takes."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, replace
from functools import cache

Capability = tuple[int, int]

VARIABLE = "OSTINATO_CAPABILITY"
# What GPUs after sm_80 have, of what our kernels or torch's operators in their place use.
FP8 = "fp8"  # conversions to e4m3, and products of it
CLUSTERS = "clusters"  # of CTAs; programmatic launches came with them
# Of its own: wgmma, TMA copies and clusters as our kernels take them, an L2 of two partitions.
HOPPER = "hopper"


@dataclass(frozen=True)
class Target:
    """A GPU as nvcc names it.

    Args:
        name: without "sm_"; with the suffix where code for it runs on no other GPU.
        capability: the compute capability of the GPU.
        features: what it has that sm_80 has not.
        ptx: compile to PTX, which a driver translates for any later GPU, not to machine code.
    """

    name: str
    capability: Capability
    features: frozenset[str] = frozenset()
    ptx: bool = False

    @property
    def gencode(self) -> str:
        """The value of nvcc's -gencode."""
        kind = "compute" if self.ptx else "sm"
        return f"arch=compute_{self.name},code={kind}_{self.name}"

    def __str__(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.name}"


TARGETS = (
    Target("80", (8, 0)),
    Target("86", (8, 6)),
    Target("87", (8, 7)),
    Target("89", (8, 9), frozenset({FP8})),
    Target("90a", (9, 0), frozenset({FP8, CLUSTERS, HOPPER})),
    Target("100", (10, 0), frozenset({FP8, CLUSTERS})),
    Target("103", (10, 3), frozenset({FP8, CLUSTERS})),
    Target("120", (12, 0), frozenset({FP8, CLUSTERS})),
)

# For which every variant is.
DEFAULT = next(target for target in TARGETS if HOPPER in target.features)


def target_named(name: str) -> Target:
    """Return the target of a name: 80 or sm_80, and compute_80 for PTX.

    Raises:
        ValueError: when the table has none.
    """
    for target in TARGETS:
        if name in (target.name, f"sm_{target.name}"):
            return target
        if name == f"compute_{target.name}":
            return replace(target, ptx=True)
    names = ", ".join(target.name for target in TARGETS)
    raise ValueError(f"arch: got {name!r}, expected one of {names}")


def target_of(capability: Capability) -> Target | None:
    """Return the target whose code runs on a GPU; None where the table has none.

    Code runs on later GPUs of the same major number, so that one that is newer than the table runs
    the code of the nearest before it.
    """
    fitting = [
        target
        for target in TARGETS
        if target.capability[0] == capability[0] and target.capability <= capability
    ]
    return max(fitting, key=lambda target: target.capability, default=None)


@cache
def capability_of(device: int) -> Capability:
    """Return the compute capability that kernels are chosen by on a device.

    It is the device's own unless OSTINATO_CAPABILITY names another, such as 8.0: then the device
    stands in for a GPU of that one, with its choice of kernels and operators.

    Args:
        device: index of the device.

    Raises:
        ValueError: when OSTINATO_CAPABILITY is malformed, or names what the device can not stand in
            for.
        RuntimeError: when the CUDA driver knows no such device.
    """
    return _stood_in_for(_driver_capability(device))[0]


@cache
def target_for(device: int) -> Target | None:
    """Return what kernels are compiled for on a device, None where there is no target for it.

    A device that stands in for an earlier GPU runs that GPU's kernels as PTX. One that stands in
    for a later GPU runs its own machine code, of the same sources.

    Raises:
        ValueError, RuntimeError: as `capability_of`.
    """
    own = _driver_capability(device)
    capability, target = _stood_in_for(own)
    if target is None or capability == own:
        return target
    return replace(target, ptx=True) if capability < own else target_of(own)


def local_target() -> Target:
    """Return what kernels are compiled for on this machine's first GPU.

    Without a GPU, or for one that has no target, that is `DEFAULT`.

    Raises:
        ValueError: as `capability_of`.
    """
    try:
        return target_for(0) or DEFAULT
    except (OSError, RuntimeError):  # no driver, or no GPU
        return DEFAULT


def _stood_in_for(own: Capability) -> tuple[Capability, Target | None]:
    """Return the capability that counts on a device of capability `own`, and its target."""
    here = target_of(own)
    text = os.environ.get(VARIABLE)
    if not text:
        return own, here
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None:
        raise ValueError(f"{VARIABLE}: got {text!r}, expected a capability such as 8.0")
    capability = (int(match[1]), int(match[2]))
    target = target_of(capability)
    if target is None:
        least = "{}.{}".format(*TARGETS[0].capability)
        raise ValueError(f"{VARIABLE}: got {text}, expected one of a known GPU, from {least} on")
    missing = target.features - (frozenset() if here is None else here.features)
    if here is None or missing:
        lacks = " and ".join(sorted(missing)) or "all that kernels need"
        raise ValueError(
            f"{VARIABLE}: got {text}, expected what a device of capability {own[0]}.{own[1]} can "
            f"stand in for: it lacks {lacks}"
        )
    return capability, target


def _driver_capability(device: int) -> Capability:
    # By the driver, since kernels are loaded without torch.
    driver = ctypes.CDLL("libcuda.so.1")
    handle, value = ctypes.c_int(), ctypes.c_int()

    def call(name: str, *arguments: object) -> None:
        error = getattr(driver, name)(*arguments)
        if error != 0:
            raise RuntimeError(f"device {device}: {name} of the CUDA driver returned {error}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(handle), device)
    found = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        found.append(value.value)
    return found[0], found[1]
