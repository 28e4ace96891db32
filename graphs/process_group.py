"""Capturing in several processes whose steps communicate: all of them succeed, or all fail.

The ranks meet through the store of their process group, which is in the memory of a host: a
collective would hang on the very failure that is to be reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed

from .arguments import as_seconds
from .errors import RankError

DEFAULT_TIMEOUT_S = 600.0  # a rank may compile kernels in its warm-up while the others wait
_LINGER_S = 5.0  # for others to read of a failure before its process may end, with the store
_IDLE_S = 10.0  # for the device to finish by itself what a failed rank takes no more part in
_ABORT_S = 20.0  # for it to do so once the group has been aborted
_POLL_S = 0.01

_LOST = "lost"  # what is known of lost ranks, for all meetings of a group

# How many of these each group has had: the runners of a group are made in one order by all ranks.
_made: WeakKeyDictionary[distributed.ProcessGroup, int] = WeakKeyDictionary()


class CaptureGroup:
    """Holds the ranks of a group together through a capture.

    Args:
        group: the processes; None for this one alone, which has nobody to wait for.
        timeout_s: how long to wait for another rank at each meeting.
    """

    def __init__(
        self, group: distributed.ProcessGroup | None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if as_seconds("group_timeout_s", timeout_s) <= 0:
            raise ValueError(f"group_timeout_s: got {timeout_s}, expected a positive number")
        self._group = group
        self._timeout_s = timeout_s
        self._meeting = 0
        self._told = False  # the others, of a problem that ends the capture
        self._broken: str | None = None
        if group is None:
            self.size, self._rank = 1, 0
            return
        self.size, self._rank = group.size(), group.rank()
        number = _made[group] = _made.get(group, 0) + 1
        self._shared = shared_store(group)
        self._store = distributed.PrefixStore(  # type: ignore[attr-defined]  # it is public
            str(number), self._shared
        )

    def agree(self, at: str, problem: str | None = None) -> None:
        """Wait until every rank is here without a problem.

        Args:
            at: where, in words; it must be the same for all.
            problem: of this rank. Then the others are told, and this returns soon.

        Raises:
            RankError: when another rank has a problem, is somewhere else, or does not come. With a
                problem of its own only where another rank's came first.
        """
        if self.size == 1 or self._told:
            return
        if self._broken is not None:
            raise RankError(f"the ranks are out of step since an earlier failure: {self._broken}")
        meeting, self._meeting = self._meeting, self._meeting + 1
        others = [rank for rank in range(self.size) if rank != self._rank]
        try:
            known = self._posted(meeting, others) if problem is not None else {}
            self._store.set(f"{meeting}/{self._rank}", json.dumps({"at": at, "problem": problem}))
            if problem is not None:
                self._told = True
                if any(post["problem"] is not None for post in known.values()):
                    self._store.set(f"{meeting}/read/{self._rank}", "")
                    _raise_problems(known)
                self._linger(meeting, others)
                return
            said = self._wait(meeting, others, at)
            if any(post["problem"] is not None for post in said.values()):
                self._store.set(f"{meeting}/read/{self._rank}", "")
            _raise_problems(said)
            for rank, post in said.items():
                if post["at"] != at:
                    raise RankError(
                        f"rank {rank} is at {post['at']!r}, and this one, rank {self._rank}, at "
                        f"{at!r}: every rank must capture the same"
                    )
            with suppress(RuntimeError):  # some kinds of store cannot forget
                if meeting:
                    self._store.delete_key(f"{meeting - 1}/{self._rank}")
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            self._broken = f"the store of the group failed: {error}"
            raise RankError(self._broken) from error

    def failed(
        self, error: BaseException, is_idle: Callable[[], bool]
    ) -> tuple[RankError | None, bool]:
        """Tell the others of an error that ends the capture here, and free the device.

        Args:
            error: what is being raised.
            is_idle: tells whether the device has finished what it was given.

        Returns:
            The error to raise instead, where another rank's failure came first; and whether the
            device has finished, so that graphs and memory can be given back. If not, it waits for
            a rank that takes no more part, and no wait for it would end.
        """
        if self.size == 1:
            return None, True
        first = None
        if not isinstance(error, RankError):
            try:
                self.agree("the end of the capture", f"{type(error).__name__}: {error}")
            except RankError as other:
                first = other if other.failures else None  # a store that is gone says less
        self._told = False
        return first, self._free_device(is_idle)

    def _free_device(self, is_idle: Callable[[], bool]) -> bool:
        if _wait_until(is_idle, _IDLE_S):
            return True
        # A kernel of NCCL's waits on the device for a rank that will not come.
        self._broken = "the group was aborted, since the device waited for a rank that had failed"
        with suppress(Exception):  # not every backend can
            _abort(self._group)
        return _wait_until(is_idle, _ABORT_S)

    def _posted(self, meeting: int, ranks: list[int]) -> dict[int, dict[str, Any]]:
        keys = {rank: f"{meeting}/{rank}" for rank in ranks}
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _wait(self, meeting: int, ranks: list[int], at: str) -> dict[int, dict[str, Any]]:
        """Return what the ranks say at a meeting; as soon as one of them says a problem, no more.

        Raises:
            RankError: when some do not come.
        """
        deadline = time.monotonic() + self._timeout_s
        said: dict[int, dict[str, Any]] = {}
        pause_s = _POLL_S / 64
        while True:
            if self._store.check(["gave up"]):  # also where all have come by now
                self._broken = self._store.get("gave up").decode()
                raise RankError(self._broken)
            if self._shared.check([_LOST]):
                failures = lost_ranks(self._shared)
                self._broken = describe(failures)
                raise RankError(self._broken, failures)
            missing = [rank for rank in ranks if rank not in said]
            said.update(self._posted(meeting, missing))
            missing = [rank for rank in ranks if rank not in said]
            if not missing or any(post["problem"] is not None for post in said.values()):
                return said
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(map(str, missing))
                self._broken = (
                    f"rank {names} did not come to {at!r} within {self._timeout_s:g} s, and rank "
                    f"{self._rank} gave up"
                )
                self._store.set("gave up", self._broken)
                raise RankError(self._broken, dict.fromkeys(missing, "did not come"))
            time.sleep(pause_s)  # not the store's own wait, which complains when it is in vain
            pause_s = min(2 * pause_s, _POLL_S)

    def _linger(self, meeting: int, ranks: list[int]) -> None:
        keys = [f"{meeting}/read/{rank}" for rank in ranks]
        _wait_until(lambda: self._store.check(keys), min(_LINGER_S, self._timeout_s))


def _raise_problems(said: dict[int, dict[str, Any]]) -> None:
    failures = {rank: post["problem"] for rank, post in said.items() if post["problem"] is not None}
    if failures:
        problems = {rank: f"failed: {problem}" for rank, problem in failures.items()}
        raise RankError(describe(problems), failures)


def describe(failures: Mapping[int, str]) -> str:
    """Return what happened to ranks, a line for each, such as "rank 1 failed: no memory"."""
    return "\n".join(f"rank {rank} {what}" for rank, what in failures.items())


def shared_store(group: distributed.ProcessGroup) -> Any:
    """Return the part of a group's store that is ours, on a connection that the group shares."""
    return distributed.PrefixStore(  # type: ignore[attr-defined]  # it is public
        f"ostinato/{group.group_name}", _store_of(group)
    )


def declare_lost(store: Any, failures: Mapping[int, str]) -> dict[int, str]:
    """End every meeting of a group, for good, because ranks are lost; the first call counts.

    Args:
        store: of `shared_store`.
        failures: ranks and what happened to each, the predicate of a sentence.

    Returns:
        What the first call has said.
    """
    told: bytes = store.compare_set(_LOST, "", json.dumps(failures))
    return _failures(told)


def lost_ranks(store: Any) -> dict[int, str]:
    """Return what `declare_lost` has been told; nothing before that."""
    return _failures(store.get(_LOST)) if store.check([_LOST]) else {}


def _failures(told: bytes) -> dict[int, str]:
    return {int(rank): what for rank, what in json.loads(told).items()}


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _store_of(group: distributed.ProcessGroup) -> Any:
    if hasattr(group, "get_group_store"):  # from torch 2.13 on, at the latest
        return group.get_group_store()
    return distributed.distributed_c10d._get_process_group_store(group)


def _abort(group: distributed.ProcessGroup | None) -> None:
    abort = getattr(group, "abort", None)
    if abort is not None:
        abort()
    else:
        distributed.distributed_c10d._abort_process_group(group)
