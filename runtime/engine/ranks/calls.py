"""What keeps the engines of several ranks in one state: rank 0's calls, done by all in one order.

An engine's decisions depend on nothing but its calls and the tokens that it samples, and ranks
sample the same from the same bits. What depends on anything else comes from rank 0: seeds, compiled
grammars, and which text's grammar has taken too long. The number of pages is the smallest of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import distributed

from ...models import PagedKVCache
from ...parallel import Ranks
from ...parallel.channel import unlike
from ..request import Request
from .requests import GrammarLog, request_document

_LOAD_S = 3600.0  # that a rank may take longer than another to load; a dead one is known before
STEP = "step"  # the one call that takes no longer than a rank may be silent


class Calls(Protocol):
    """How an engine does its calls: alone, or together with those of other ranks."""

    @property
    def group(self) -> distributed.ProcessGroup | None:
        """The processes that capture together."""

    @property
    def compares(self) -> bool:
        """Whether there is another rank whose tokens may differ."""

    @property
    def leads(self) -> bool:
        """Whether the engine is called by its caller, and not by rank 0."""

    def agree(self, pages: int, options: dict[str, object]) -> int:
        """Return the pages that every rank has, and check that ranks have the same options."""

    def require_leading(self, call: str) -> None:
        """Check that this rank is the one that is called."""

    def submitted(self, request: Request) -> None:
        """Note a request that was queued."""

    def ended(self, how: str, request_id: int) -> None:
        """Note a request that was ended: "cancel" or "fail"."""

    def together(self, name: str, **details: object) -> Any:
        """Return a context for a call that all ranks do; JSON writes its details."""

    def launched(self, requests: Sequence[Request], cache: PagedKVCache) -> None:
        """Note what the next launch works on."""

    def sampled(self, tokens: Sequence[int]) -> None:
        """Note tokens that a launch has sampled."""

    def confirm(self) -> None:
        """Check that all ranks have noted the same, before anything comes of it."""

    def close(self) -> None:
        """End the engines of the other ranks."""


class OneRank:
    """The calls of an engine that is alone."""

    group: distributed.ProcessGroup | None = None
    compares = False
    leads = True

    def agree(self, pages: int, options: dict[str, object]) -> int:
        return pages

    def require_leading(self, call: str) -> None:
        pass

    def submitted(self, request: Request) -> None:
        pass

    def ended(self, how: str, request_id: int) -> None:
        pass

    def together(self, name: str, **details: object) -> Any:
        return nullcontext()

    def launched(self, requests: Sequence[Request], cache: PagedKVCache) -> None:
        pass

    def sampled(self, tokens: Sequence[int]) -> None:
        pass

    def confirm(self) -> None:
        pass

    def close(self) -> None:
        pass


class RankCalls:
    """The calls of an engine that is one of several ranks.

    Rank 0 sends each call before it does it, with what was submitted and cancelled since the last.
    All ranks keep a digest of what they launch and sample; before tokens are handed out rank 0
    compares the digests of all, while the device works on the next step.

    Args:
        ranks: of which this process is one.
    """

    compares = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: list[tuple[str, dict[str, Any]]] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self._confirmed = 0
        self._closed = self._follows = False
        self._sent_grammars = GrammarLog()
        self.leads = ranks.leads
        self.group = ranks.group

    def agree(self, pages: int, options: dict[str, object]) -> int:
        told = self._ranks.channel.meet(
            "a new engine", [pages, json.loads(json.dumps(options))], timeout_s=_LOAD_S
        )
        said = [own for _, own in told]
        for rank, name in unlike(said):
            got, expected = said[rank][name], said[0][name]
            raise ValueError(
                f"{name}: got {got!r} on rank {rank}, expected {expected!r} as on rank 0"
            )
        return min(int(count) for count, _ in told)

    def require_leading(self, call: str) -> None:
        if not self.leads:
            rank = self._ranks.rank
            raise RuntimeError(
                f"{call}: called on rank {rank}, expected rank 0; here call follow()"
            )

    def submitted(self, request: Request) -> None:
        if self.leads:
            self._pending.append(("submit", request_document(request, self._sent_grammars)))

    def ended(self, how: str, request_id: int) -> None:
        if self.leads:
            self._pending.append((how, {"request_id": request_id}))

    @contextmanager
    def together(self, name: str, **details: object) -> Iterator[None]:
        ranks = self._ranks
        if not self._follows:
            self.require_leading(name)
        ranks.watchdog.check()
        with ranks.guarded():
            if self.leads:
                calls, self._pending = [*self._pending, (name, details)], []
                ranks.channel.send(json.dumps(calls).encode())
            with ranks.watchdog.working() if name == STEP else nullcontext():
                confirmed = self._confirmed
                yield
                if confirmed == self._confirmed:
                    self.confirm()

    def launched(self, requests: Sequence[Request], cache: PagedKVCache) -> None:
        rows = [(r.id, r.slot, r.length, r.computed) for r in requests]
        self._note(f"{rows} {cache.free_pages}")

    def sampled(self, tokens: Sequence[int]) -> None:
        self._note(str(tokens))

    def confirm(self) -> None:
        self._confirmed += 1
        self._ranks.check()
        self._ranks.channel.confirm(self._digest.hexdigest())
        self._ranks.watchdog.went_on()

    def receive(self) -> list[tuple[str, dict[str, Any]]]:
        """Wait for rank 0's next calls, and return their names and details; none at the end."""
        message = self._ranks.channel.receive()
        return json.loads(message) if message else []

    @contextmanager
    def following(self) -> Iterator[None]:
        """All that this rank does for rank 0."""
        self._follows = True
        try:
            with self._ranks.guarded(), self._ranks.ended_by_rank_0():
                yield
        finally:
            self._follows = False

    def close(self) -> None:
        if self.leads and not self._closed and self._ranks.watchdog.failure is None:
            self._ranks.channel.send(json.dumps([("close", {})]).encode())
        self._closed = True

    def _note(self, text: str) -> None:
        self._digest.update(text.encode())


def calls_of(ranks: Ranks | None) -> OneRank | RankCalls:
    """Return how an engine of these ranks does its calls."""
    return OneRank() if ranks is None else RankCalls(ranks)
