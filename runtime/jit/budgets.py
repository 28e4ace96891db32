"""What a kernel takes of an SM, as ptxas reports it, and the committed limits on that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import write_whole

# wgmma made to wait for each other, by a call (C7508) or for another reason (C7510).
_SLOW_WGMMA = re.compile(r"\((C75\d\d)\)\s*(.*)")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """The largest figure of each kind over the kernels of a library.

    Args:
        registers: per thread, at launch.
        stack: bytes of local memory per thread, spills included.
        spills: bytes stored and loaded per thread because registers ran out.
        smem: bytes of statically allocated shared memory; a launch may ask for more.
        warnings: what ptxas says about serialised wgmma, such as "C7510 Potential ...".
    """

    registers: int
    stack: int
    spills: int
    smem: int
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_json(fields: Mapping[str, object]) -> Usage:
        """Read what `dataclasses.asdict` and JSON made of a `Usage`."""
        numbers = {name: int(str(fields[name])) for name in LIMITS}
        warnings = fields.get("warnings", [])
        if not isinstance(warnings, list):
            raise ValueError(f"warnings: got {warnings!r}, expected a list")
        return Usage(**numbers, warnings=tuple(map(str, warnings)))


LIMITS = ("registers", "stack", "spills", "smem")


def parse_ptxas(log: str) -> Usage:
    """Read the output of `nvcc -Xptxas -v`.

    Raises:
        ValueError: when it describes no kernel.
    """
    entries = set(_ENTRY.findall(log))
    found = dict.fromkeys(LIMITS, 0)
    current = ""
    kernels = 0
    for line in log.splitlines():
        if match := _ENTRY.search(line) or _PROPERTIES.search(line):
            current = match[1]
        elif match := _STACK.search(line):
            # A function that is called, not inlined, has properties of its own.
            found["stack"] = max(found["stack"], int(match[1]))
            found["spills"] = max(found["spills"], int(match[2]) + int(match[3]))
        elif (match := _USED.search(line)) and current in entries:
            kernels += 1
            smem = _SMEM.search(line)
            found["registers"] = max(found["registers"], int(match[1]))
            found["smem"] = max(found["smem"], int(smem[1]) if smem else 0)
    if not kernels:
        raise ValueError(f"no kernel in ptxas's output: got {log[:500]!r}")
    warnings = sorted({f"{code} {text.strip()}" for code, text in _SLOW_WGMMA.findall(log)})
    return Usage(**found, warnings=tuple(warnings))


def excesses(usage: Usage, budget: Mapping[str, int] | None) -> list[str]:
    """Return what is wrong with a kernel, in words: limits exceeded, wgmma serialised.

    Args:
        usage: of the kernel.
        budget: a limit for each of `LIMITS`; None when the kernel has none, which is wrong too.
    """
    found = list(usage.warnings)
    if budget is None:
        return [*found, "it has no budget"]
    used = asdict(usage)
    found += [
        f"{name}: got {used[name]}, expected at most {budget[name]}"
        for name in LIMITS
        if used[name] > budget[name]
    ]
    return found


def read_budgets(file: Path) -> dict[str, dict[str, int]]:
    """Read the limits of all variants: name -> {one number for each of `LIMITS`}.

    Raises:
        ValueError: naming the file and the variant, when a limit is missing or no number.
        OSError: when the file cannot be read.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file}: got {document!r}, expected an object")
    for name, budget in document.items():
        if (
            not isinstance(budget, dict)
            or set(budget) != set(LIMITS)
            or not all(type(limit) is int for limit in budget.values())
        ):
            raise ValueError(f"{file}: {name}: got {budget!r}, expected integers {LIMITS}")
    return document


def write_budgets(file: Path, usages: Mapping[str, Usage]) -> None:
    """Make what these variants take now their limits, keeping those of others."""
    budgets = read_budgets(file) if file.exists() else {}
    for name, usage in usages.items():
        budgets[name] = {limit: asdict(usage)[limit] for limit in LIMITS}
    lines = (f"  {json.dumps(name)}: {json.dumps(budgets[name])}" for name in sorted(budgets))
    write_whole(file, "{\n" + ",\n".join(lines) + "\n}\n")
