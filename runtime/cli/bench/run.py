"""How `bench` runs: the peers that it asks for, and cases for as long as there is time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..command import UserError

if TYPE_CHECKING:
    from ...bench.results import CaseResult
    from ..budget import Budget
    from .output import Output


class _Peer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def prepare(self) -> Callable[[], object]: ...


_PeerT = TypeVar("_PeerT", bound=_Peer)
_CaseT = TypeVar("_CaseT")


def ready_peers(
    asked: Sequence[str],
    known: Collection[str],
    find: Callable[[Sequence[str]], Sequence[_PeerT]],
    output: Output,
    *,
    required: bool = False,
) -> list[_PeerT]:
    """Return the peers of --peer, less those that are not installed, unless asked for by name.

    Args:
        asked: names, or all or none.
        known: the names of all.
        find: returns the peers of some names; raises `ValueError` for an unknown one.
        output: says which are not timed.
        required: as if each were asked for by name.

    Raises:
        UserError: for an unknown name, and for a peer asked for by name that is not installed.
    """
    names = {"all": list(known), "none": []}.get(" ".join(asked), asked)
    try:
        found = find(names)
    except ValueError as error:
        raise UserError(f"--peer: {error}") from error
    ready = []
    for peer in found:
        try:
            peer.prepare()
        except Exception as error:  # whatever goes wrong when somebody else's package is imported
            if required or names is asked:
                raise UserError(f"{peer.name}: {error}") from error
            output.say(f"{peer.name} is not timed: {error}")
        else:
            ready.append(peer)
    return ready


def measure(
    chosen: Sequence[_CaseT], results: Iterator[CaseResult[Any]], budget: Budget, output: Output
) -> Sequence[_CaseT]:
    """Take the results of the cases, and return those for which no time was left.

    Args:
        chosen: the cases.
        results: times the next one each time it is asked.
        budget: of time.
        output: gets each result as it comes.
    """
    for done in range(len(chosen)):
        if not budget.allows_another():
            return chosen[done:]
        output.add(next(results))
    return []
