"""Adapters of other libraries, found in a folder that is no part of the package.

An adapter is one Python file for each library. It imports the library only when an implementation
is prepared, and has a function `peers(section, environ)` that returns the library's
implementations (`harness.benchmark.Implementation`) for a benchmark, none for benchmarks that the
library has nothing for. `environ` maps environment variables to values.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .. import machine
from .benchmark import Benchmark, Implementation

VARIABLE = "OSTINATO_BENCH_PEERS"
IN_CHECKOUT = Path("examples", "bench_peers")


class MissingAdapterError(ImportError):
    """A peer whose adapter is in no folder that was searched."""


def adapter_folder(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of adapters: --peers, `OSTINATO_BENCH_PEERS`, or that of the checkout.

    Raises:
        ValueError: when the first two name something else than a folder.
    """
    sources = {"--peers": given, VARIABLE: environ.get(VARIABLE)}
    for source, named in sources.items():
        if named is not None:
            if not Path(named).is_dir():
                raise ValueError(f"{source}: got {named}, expected a folder of adapters")
            return Path(named)
    in_checkout = machine.location().parent / IN_CHECKOUT
    return in_checkout if in_checkout.is_dir() else None


def load_adapter(file: Path) -> ModuleType:
    """Return the module of an adapter; a second call returns the same one.

    Raises:
        ValueError: when it fails while it is loaded, or has no function `peers`.
    """
    return _load(file.resolve())


def adapter_named(file: str, folder: Path | None) -> ModuleType:
    """Return the module of the adapter with this file name.

    Raises:
        MissingAdapterError: when the folder, from `adapter_folder`, does not have it.
        ValueError: as `load_adapter` does.
    """
    if folder is None or not (folder / file).is_file():
        raise MissingAdapterError(_missing_text(file, folder))
    return load_adapter(folder / file)


@cache
def _load(file: Path) -> ModuleType:
    # Not by its own name: an adapter of a library may be called like the library.
    spec = importlib.util.spec_from_file_location(f"ostinato_bench_peer_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever is wrong with somebody else's file
        raise ValueError(f"{file}: cannot be loaded: {error!r}") from error
    if not callable(getattr(module, "peers", None)):
        raise ValueError(f"{file}: got no function peers(section, environ), expected an adapter")
    return module


def find_peers(
    benchmark: Benchmark,
    folder: Path | None,
    environ: Mapping[str, str],
    expand: Callable[[Implementation], Sequence[Implementation]] = lambda peer: [peer],
) -> dict[str, list[Implementation]]:
    """Return the peers of a benchmark by name, whether or not their libraries are installed.

    Known peers come first, in the benchmark's order; then those that only an adapter knows. A known
    peer whose adapter is missing raises `MissingAdapterError` when it is prepared.

    Args:
        benchmark: which.
        folder: of the adapters, from `adapter_folder`.
        environ: passed to the adapters.
        expand: returns the implementations to time for a peer (one for each page size); none for
            a peer that this run does not compare with.

    Raises:
        ValueError: for a broken adapter, or two peers of one name.
    """
    found = _adapted(benchmark.section, folder, environ)
    peers: dict[str, list[Implementation]] = {}
    for name, known in benchmark.peers.items():
        if isinstance(known, str) and name not in found:
            peers[name] = [_missing(name, known, folder)]
        else:
            peers[name] = list(expand(found.pop(name) if isinstance(known, str) else known))
    for name, impl in found.items():
        if expanded := list(expand(impl)):
            if name in peers:
                raise ValueError(f"{folder}: got a second peer {name!r}, expected names once")
            peers[name] = expanded
    return peers


def select(asked: Sequence[str], known: Mapping[str, list[Implementation]]) -> list[Implementation]:
    """Return the implementations of the peers of these names, in the order of `known`.

    Raises:
        ValueError: for an unknown name.
    """
    for name in asked:
        if name not in known:
            raise ValueError(f"got {name!r}, expected all or none or {' or '.join(known)}")
    return [impl for name, impls in known.items() if name in asked for impl in impls]


def _adapted(
    section: str, folder: Path | None, environ: Mapping[str, str]
) -> dict[str, Implementation[Any, Any]]:
    found: dict[str, Implementation] = {}
    for file in sorted(folder.glob("*.py")) if folder is not None else ():
        for impl in load_adapter(file).peers(section, environ):
            if impl.name in found:
                raise ValueError(f"{file}: got a second peer {impl.name!r}, expected names once")
            found[impl.name] = impl
    return found


def _missing(name: str, file: str, folder: Path | None) -> Implementation:
    return Implementation(
        name, None, _never_bound, prepare=partial(_raise, _missing_text(file, folder))
    )


def _missing_text(file: str, folder: Path | None) -> str:
    where = f"{folder} has no {file}" if folder is not None else f"no folder with {file} is known"
    return (
        f"{where}: adapters of peers are not installed with ostinato; copy {IN_CHECKOUT} of its "
        f"source tree, and name the copy by --peers or {VARIABLE}"
    )


def _raise(reason: str) -> NoReturn:
    raise MissingAdapterError(reason)


def _never_bound(case: object, sets: object) -> NoReturn:
    raise AssertionError("a missing peer is never prepared, so never bound")
