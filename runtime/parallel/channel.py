"""What the ranks of a group say to each other on the host: through its store, never by collectives.

A collective of gloo's or NCCL's would wait for a lost rank until its own timeout, and an idle rank
waits for its next message without any. A read of the store takes some 25 µs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ostinato.graphs.errors import RankError
from ostinato.graphs.process_group import declare_lost, describe, lost_ranks

from .watchdog import Watchdog

T = TypeVar("T")

# Between two looks: a share of the time waited so far, since each look costs the store's host, too.
_SHORTEST_S, _LONGEST_S, _SHARE = 20e-6, 4e-3, 1 / 16
_HEARD_S = 2.0  # for others to read what rank 0 has said, before it ends and with it the store
_MEETING_S = 20e-3  # at the longest where ranks meet, which is never in the middle of serving
# A message's parts are overwritten by a later one's only when all have taken part in a later call.
_MESSAGES, _CONFIRMATIONS = 4, 64
_PART = 1 << 20  # bytes; stores refuse values of more than some MiB


class Channel:
    """Messages from rank 0 to all others, confirmations to it, and meetings of all.

    Every wait ends when a rank is lost, with the RankError of the watchdog.

    Args:
        store: of the group.
        rank, size: this one, and how many there are.
        timeout_s: how long to wait for a rank that should answer.
        watchdog: None before there is one: then nothing but `timeout_s` ends a meeting.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, watchdog: Watchdog | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self.watchdog = watchdog
        self._meetings = self._sent = self._received = self._confirmed = 0

    def meet(self, at: str, value: object, *, timeout_s: float | None = None) -> list[Any]:
        """Wait until every rank is here, and return the values of all, by rank.

        Args:
            at: where, in words; it must be the same for all.
            value: that JSON can write.
            timeout_s: another than the channel's; of what may take the others a while.

        Raises:
            RankError: when another rank is somewhere else, does not come, or is lost.
        """
        meeting, self._meetings = self._meetings, self._meetings + 1
        self._guarded(
            lambda: self._store.set(f"meet/{meeting}/{self._rank}", json.dumps([at, value]))
        )
        ranks = range(self._size)

        def missing() -> list[int]:
            return [rank for rank in ranks if not self._store.check([f"meet/{meeting}/{rank}"])]

        seconds = self._timeout_s if timeout_s is None else timeout_s
        if not self._poll(lambda: not missing() or None, seconds, _MEETING_S):
            raise self._lost(dict.fromkeys(missing(), f"did not come to {at!r} in {seconds:g} s"))
        said = [
            json.loads(self._guarded(lambda r=rank: self._store.get(f"meet/{meeting}/{r}")))  # type: ignore[misc]
            for rank in ranks
        ]
        first = said[0][0]
        for rank, (where, _) in enumerate(said):
            if where != first:
                raise self._lost({rank: f"is at {where!r}, and rank 0 at {first!r}"})
        return [told for _, told in said]

    def require_alike(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Check that all ranks have told the same options.

        Raises:
            RankError: naming those that have not told what rank 0 has.
        """
        odd: dict[int, str] = {}
        for rank, name in unlike(told):
            text = f"has {name} {told[rank][name]}, expected {told[0][name]} as on rank 0"
            odd.setdefault(rank, text)
        if odd:
            raise self._lost(odd)

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all others; an empty one ends `receive`."""
        slot = self._sent % _MESSAGES
        parts = [message[at : at + _PART] for at in range(0, len(message), _PART)] or [b""]

        def write() -> None:
            for number, part in enumerate(parts[1:], start=1):
                self._store.set(f"message/{slot}/{number}", part)
            self._store.set(f"message/{slot}", b"%d %d " % (self._sent, len(parts)) + parts[0])

        self._guarded(write)
        self._sent += 1

    def receive(self) -> bytes:
        """Wait for rank 0's next message, however long that takes while it lives."""
        slot, number = self._received % _MESSAGES, b"%d" % self._received

        def look() -> bytes | None:
            key = f"message/{slot}"
            if not self._store.check([key]):
                return None
            stored: bytes = self._store.get(key)
            sent, parts, first = stored.split(b" ", 2)
            if sent != number:
                return None
            rest = [self._store.get(f"{key}/{part}") for part in range(1, int(parts))]
            return first + b"".join(rest)

        message = self._poll(look, None)
        assert message is not None
        self._received += 1
        return message

    def confirm(self, digest: str) -> None:
        """Compare what the ranks have computed: rank 0 waits for all others, which go on.

        Args:
            digest: of this rank.

        Raises:
            RankError: on rank 0, where one differs, or does not come to this.
        """
        number, self._confirmed = self._confirmed, self._confirmed + 1
        slot = number % _CONFIRMATIONS
        own = f"{number} {digest}"
        if self._rank:
            self._guarded(lambda: self._store.set(f"confirm/{slot}/{self._rank}", own))
            return
        others = list(range(1, self._size))
        keys = [f"confirm/{slot}/{rank}" for rank in others]
        said: dict[int, str] = {}

        def look() -> bool | None:
            if number < _CONFIRMATIONS and not self._store.check(keys):
                return None
            said.update(zip(others, (t.decode() for t in self._store.multi_get(keys)), strict=True))
            return all(told.split(" ")[0] == str(number) for told in said.values()) or None

        if not self._poll(look, self._timeout_s):
            late = [r for r in others if said.get(r, "").split(" ")[0] != str(number)]
            raise self._lost(dict.fromkeys(late, f"did not end a step in {self._timeout_s:g} s"))
        differing = {rank for rank, told in said.items() if told != own}
        if differing:
            raise self._lost(_differing(own, said, differing))

    def _lost(self, failures: dict[int, str]) -> RankError:
        if self.watchdog is not None:
            return self.watchdog.tell(failures)
        return self._lost_at_the_start(declare_lost(self._store, failures))

    def _lost_at_the_start(self, told: dict[int, str]) -> RankError:
        """Return the error of ranks that are lost while there is no watchdog yet."""
        if self._rank == 0:
            time.sleep(_HEARD_S)
        return RankError(describe(told), told)

    def _poll(
        self, look: Callable[[], T | None], timeout_s: float | None, longest_s: float = _LONGEST_S
    ) -> T | None:
        """Look until there is something; None when `timeout_s` has passed."""
        if self.watchdog is None:
            return self._looked(look, timeout_s, longest_s)
        self.watchdog.waits = True
        try:
            return self._looked(look, timeout_s, longest_s)
        finally:
            self.watchdog.waits = False

    def _looked(
        self, look: Callable[[], T | None], timeout_s: float | None, longest_s: float
    ) -> T | None:
        started = time.monotonic()
        while True:
            if self.watchdog is not None:
                self.watchdog.check()
            elif told := self._guarded(lambda: lost_ranks(self._store)):
                raise self._lost_at_the_start(told)
            found = self._guarded(look)
            if found is not None:
                return found
            waited = time.monotonic() - started
            if timeout_s is not None and waited > timeout_s:
                return None
            time.sleep(min(max(_SHORTEST_S, waited * _SHARE), longest_s))

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            failure = None if self.watchdog is None else self.watchdog.blame(error)
            raise failure or RankError(f"the store of the group failed: {error}") from error


def unlike(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the ranks that have told something else than rank 0, each with the option's name."""
    for rank, own in enumerate(told):
        for name, first in told[0].items():
            if own[name] != first:
                yield rank, name


def _differing(own: str, said: dict[int, str], differing: set[int]) -> dict[int, str]:
    """Return which ranks differ from most, and if there are two camps alike from rank 0."""
    agreeing = len(said) - len(differing)
    if len(set(said.values())) == 1 and agreeing == 0 and len(said) > 1:
        return {0: "computed something else than all other ranks"}
    return dict.fromkeys(sorted(differing), "computed something else than rank 0")
