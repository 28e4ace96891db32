"""Checks that two checkouts compile every kernel to the same machine instructions.

    python tests/jit/compare_sass.py record CHECKOUT FILE   # compile and disassemble one checkout
    python tests/jit/compare_sass.py compare OLD NEW        # compare two such files
    python tests/jit/compare_sass.py both OLD_CHECKOUT NEW_CHECKOUT

`record` goes on where an earlier run with the same FILE stopped, so that it fits into a limited
time (`--seconds`). Names of symbols and the offsets of kernel parameters in constant memory, also
those added to its address, are left out: renaming or reordering them changes no instruction.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

# Runs in the checkout's own package: prints one JSON object per variant of its catalogue.
_LIST = """
import importlib, json, sys
def load(*names):
    for name in names:
        try:
            return importlib.import_module(f"ostinato.{name}")
        except ModuleNotFoundError as error:
            if error.name not in (f"ostinato.{name}", f"ostinato.{name.rpartition('.')[0]}"):
                raise
    raise SystemExit(f"{sys.path[0]}: has no ostinato.{' and no ostinato.'.join(names)}")
catalogue = load("ops.catalogue", "kernels.catalogue")
compiler = load("jit.compiler", "kernels.compiler")
toolchain = load("jit.toolchain", "kernels.toolchain")
nvcc, cutlass = toolchain.require_nvcc(), toolchain.require_cutlass()
for variant in getattr(catalogue, "CATALOGUE", None) or catalogue.catalogue():
    command = compiler.plan(variant).command(nvcc, cutlass)
    print(json.dumps({"name": variant.name, "family": variant.family,
                      "source": str(variant.source), "command": command}))
"""
_TARGET = ("-gencode", "arch=compute_90a,code=sm_90a")
_PARAMETERS = 0x210  # where constant bank 0 holds the parameters of a kernel for sm_90
_FUNCTION = re.compile(r"^\s*Function\s*:")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)")
_CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[((?:U?R\w+(?:\.\w+)?\+)?)(-?0x[0-9a-f]+)\]")
# The address of the parameters, loaded into a pair of registers, and an offset that is added to it.
_ADDRESS = re.compile(r"ULDC\.64 (UR\d+), c\[0x0\]\[0x198\] ;")
_ADDED = re.compile(r"(UIADD3 UR\d+, UP\d, (UR\d+), )0x[0-9a-f]+(, URZ ;)")
_WRITTEN = re.compile(r"^(?:@!?U?P\d+ )?[\w.]+ (UR\d+)\b")
_SYMBOL = re.compile(r"`\([^)]*\)|\b_Z\w+")
_SHOWN_LINES = 12


def package_links(checkout: Path, folder: Path) -> None:
    """Lay out a checkout under `folder` as the package `ostinato`, by links."""
    package = folder / "ostinato"
    package.mkdir()
    for path in (*(checkout / "runtime").iterdir(), checkout / "graphs", checkout / "csrc"):
        (package / path.name).symlink_to(path)


def list_variants(checkout: Path, python: str, folder: Path) -> list[dict[str, object]]:
    """Return name, family, source and compiler's command line of each variant of a checkout."""
    package_links(checkout, folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    listed = subprocess.run(
        [python, "-c", _LIST], env=environment, cwd=folder, capture_output=True, text=True
    )
    if listed.returncode != 0:
        raise SystemExit(f"{checkout}: its variants cannot be listed\n{listed.stderr}")
    return [json.loads(line) for line in listed.stdout.splitlines()]


def cubin_command(command: Sequence[str], source: str, output: Path) -> list[str]:
    """Return the command that compiles only the device code of a library, for one GPU."""
    flags = iter(command[1:])
    kept = []
    for flag in flags:
        if flag in ("-gencode", "-Xptxas", "-Xcompiler", "-cudart", "-cudadevrt", "-o"):
            next(flags)
        elif flag != "-shared" and not flag.startswith("-L") and not flag.endswith("entry.cpp"):
            kept.append(flag)
    if source not in kept:
        raise SystemExit(f"{source}: not in the compiler's command line {' '.join(command)}")
    return [command[0], "-cubin", *_TARGET, *kept, "-o", str(output)]


def find_cuobjdump() -> str:
    """Return the path of cuobjdump: on PATH, beside nvcc, or in the package of Triton."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit(f"cuobjdump: not found in {' '.join(folders)}; name it by --cuobjdump")
    return found


def normalise(sass: str) -> str:
    """Return the instructions of a disassembly, functions in the order of their text.

    Addresses, encodings and names of symbols are left out, and parameters' offsets become P.
    """

    def constant(found: re.Match[str]) -> str:
        bank, register, offset = found.groups()
        is_parameter = bank == "0x0" and int(offset, 16) >= _PARAMETERS
        return f"c[{bank}][{register}{'P' if is_parameter or bank == '0x4' else offset}]"

    functions: list[list[str]] = []
    for line in sass.splitlines():
        if _FUNCTION.match(line):
            functions.append(["function"])
        elif (found := _INSTRUCTION.match(line)) is not None:
            functions[-1].append(_SYMBOL.sub("SYMBOL", _CONSTANT.sub(constant, found[1])))
    if not functions or min(map(len, functions)) < 2:
        raise SystemExit("a disassembly without instructions")
    return "".join(sorted("\n".join(without_offsets(lines)) + "\n" for lines in functions))


def without_offsets(instructions: Sequence[str]) -> Iterator[str]:
    """Yield the instructions, a P for each offset that is added to the parameters' address."""
    addresses: set[str] = set()  # registers that hold it
    for instruction in instructions:
        added = _ADDED.fullmatch(instruction)
        is_offset = added is not None and added[2] in addresses
        yield _ADDED.sub(r"\1P\3", instruction) if is_offset else instruction
        if (loaded := _ADDRESS.fullmatch(instruction)) is not None:
            addresses.add(loaded[1])
        elif (written := _WRITTEN.match(instruction)) is not None:
            addresses.discard(written[1])


def disassemble(item: dict[str, object], cuobjdump: str, folder: Path) -> str:
    """Compile one variant and return its normalised instructions."""
    cubin = folder / f"{item['name']}.cubin"
    command = item["command"]
    assert isinstance(command, list)
    for step in (
        cubin_command(command, str(item["source"]), cubin),
        [cuobjdump, "-sass", str(cubin)],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{item['name']}: {' '.join(step)}\n{done.stdout}{done.stderr}")
    cubin.unlink()
    return normalise(done.stdout)


def record(arguments: argparse.Namespace, checkout: Path, file: Path) -> None:
    """Add to `file` the instructions of each chosen variant that it does not have yet."""
    begin = time.monotonic()
    cuobjdump = arguments.cuobjdump or find_cuobjdump()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        variants = list_variants(checkout.resolve(), arguments.python, folder)
        chosen = [v for v in variants if _is_chosen(v, arguments.families)]
        if not chosen:
            raise SystemExit(f"--families: no variant is called {' '.join(arguments.families)}")
        recorded = set(zipfile.ZipFile(file).namelist()) if file.exists() else set()
        left = [v for v in chosen if v["name"] not in recorded]
        done = len(chosen) - len(left)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            pending = {pool.submit(disassemble, v, cuobjdump, folder): str(v["name"]) for v in left}
            for future in as_completed(pending):
                if future.cancelled():
                    continue
                # Closed after each variant, so that an interrupted run loses none.
                with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr(pending[future], future.result())
                done += 1
                seconds = time.monotonic() - begin
                print(
                    f"{checkout} {done}/{len(chosen)} {seconds:.0f} s {pending[future]}",
                    flush=True,
                )
                if seconds > arguments.seconds:
                    pool.shutdown(wait=False, cancel_futures=True)
    if done < len(chosen):
        raise SystemExit(f"{file}: {len(chosen) - done} variants are left; run this again")


def _is_chosen(variant: dict[str, object], families: Sequence[str]) -> bool:
    return not families or variant["family"] in families or variant["name"] in families


def compare(old: Path, new: Path) -> bool:
    """Print what differs between two recorded checkouts; return whether nothing does."""
    with zipfile.ZipFile(old) as first, zipfile.ZipFile(new) as second:
        names = dict.fromkeys((*first.namelist(), *second.namelist()))
        counts = {"same": 0, "differs": 0, "in one only": 0}
        instructions = 0
        for name in names:
            texts = [
                archive.read(name).decode() if name in archive.namelist() else None
                for archive in (first, second)
            ]
            if texts[0] is None or texts[1] is None:
                result = "in one only"
            else:
                result = "same" if texts[0] == texts[1] else "differs"
                instructions += texts[0].count(";")
            counts[result] += 1
            print(f"{result:12} {name}")
            if result == "differs":
                print("\n".join(f"    {line}" for line in _difference(*texts)))
    total = ", ".join(f"{count} {result}" for result, count in counts.items())
    print(f"{len(names)} variants, {instructions} instructions: {total}")
    return bool(names) and counts["same"] == len(names)


def _difference(old: str | None, new: str | None) -> Iterator[str]:
    lines = [(text or "").splitlines() for text in (old, new)]
    first = next(
        (i for i, (a, b) in enumerate(zip(*lines, strict=False)) if a != b),
        min(map(len, lines)),
    )
    # A diff of whole kernels takes minutes.
    near = [text[max(first - 2, 0) : first + 40] for text in lines]
    differing = difflib.unified_diff(near[0], near[1], "old", "new", lineterm="", n=1)
    return (line for _, line in zip(range(_SHOWN_LINES), differing, strict=False))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "compare", "both"))
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--families", nargs="+", default=[], help="families or variants; all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing later than this")
    parser.add_argument("--python", default=sys.executable, help="which imports the checkouts")
    parser.add_argument("--cuobjdump", help="its path")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments, arguments.first, arguments.second)
        return 0
    if arguments.command == "compare":
        return 0 if compare(arguments.first, arguments.second) else 1
    with tempfile.TemporaryDirectory() as made:
        files = [Path(made) / name for name in ("old.zip", "new.zip")]
        for checkout, file in zip((arguments.first, arguments.second), files, strict=True):
            record(arguments, checkout, file)
        return 0 if compare(*files) else 1


if __name__ == "__main__":
    raise SystemExit(main())
