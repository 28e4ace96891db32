"""How many compilers this machine can run at once."""

from __future__ import annotations

import os
from pathlib import Path

_GIB = 1 << 30


def usable_cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores this process may use: its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _words(group / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory(
    group: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Return the bytes this process may still allocate: the machine's and its container's."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _words(group / "memory.max"), _words(group / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        # What the container holds of the page cache counts as used, but gives way.
        available = min(available, max(0, int(limit) - int(used) + _page_cache(group)))
    return available


def job_limit(gib_per_job: int, jobs: int | None = None) -> int:
    """Return how many jobs of this size may run at once, at least 1.

    Args:
        gib_per_job: what one job takes at its peak.
        jobs: the user's limit; the number of usable cores by default.
    """
    return max(1, min(jobs or usable_cores(), available_memory() // (gib_per_job * _GIB)))


def _page_cache(group: Path) -> int:
    for line in _words(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def _words(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
