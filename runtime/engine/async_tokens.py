"""Tokens that the device samples and the host has not read yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from ostinato.graphs.pinned_memory import pinned_words

from .. import ops
from .logprobs import HostLogprobs, TokenLogprobs
from .ranks.calls import Calls
from .request import Request
from .upload import upload

# Takes a request's token, and its log-probabilities where they are wanted.
Accept = Callable[[Request, int, TokenLogprobs | None], None]
_BLOCK = 256  # tokens that pinned memory is made for, or a multiple


@dataclass
class _Launch:
    """Work that samples one token for each of some requests, which may be none."""

    requests: tuple[Request, ...]
    tokens: torch.Tensor  # [n] int64 on the device
    host: torch.Tensor  # [n] or more, filled once `copied` has happened
    mapped: torch.Tensor | None  # its memory as the device's kernels see it, if they can
    copied: torch.cuda.Event | None
    seconds: Sequence[MutableSequence[float]]
    started: float
    logprobs: HostLogprobs | None
    ended: float | None  # by time.perf_counter; None where the host finds out when it reads
    taken: int = 0  # tokens that the host has read

    def logprobs_of(self, row: int) -> TokenLogprobs | None:
        wanted = self.requests[row].sampling_params.logprobs if self.logprobs else None
        return None if self.logprobs is None or wanted is None else self.logprobs.read(row, wanted)


class AsyncTokens:
    """What was sampled last, for the next step on the device and, later, for the host.

    So the device decodes a step while the host reads, checks and shows the tokens of the one
    before. `Request.async_tokens` counts a request's tokens that are in here.

    Args:
        device: of the sampled tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches: deque[_Launch] = deque()
        # Pinned memory of no launch, as the host and the device see it.
        self._free: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._ended = 0.0  # when the launch that was read last had ended

    def __len__(self) -> int:
        return len(self._launches)

    def add(
        self,
        requests: Sequence[Request],
        tokens: torch.Tensor,
        seconds: Sequence[MutableSequence[float]],
        started: float,
        logprobs: ops.RowLogprobs | None = None,
    ) -> None:
        """Add a launch, and start copying its tokens to the host.

        Args:
            requests: one per token; each has no token in flight but perhaps in an older launch.
                None for work that is only waited for.
            tokens: [n] int64 on the device. Work that overwrites it must be ordered after the
                current stream.
            seconds: each of which `read` gives the time that the launch took.
            started: when it began, by `time.perf_counter`.
            logprobs: of the tokens, for the requests that want some; copied likewise.
        """
        count = len(requests)
        on_host = None if logprobs is None else HostLogprobs(logprobs)
        if self._device.type == "cuda":
            host, mapped = self._pinned(count)
            if mapped is None:
                host[:count].copy_(tokens, non_blocking=True)
            elif count:  # the next step would wait for a copy engine
                torch._foreach_copy_([mapped[:count]], [tokens])
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
        else:
            host, mapped, copied = tokens.clone(), None, None
        ended = None if copied else time.perf_counter()
        launch = _Launch(
            *(tuple(requests), tokens, host, mapped, copied, seconds, started, on_host, ended)
        )
        for request in requests:
            request.async_tokens += 1
        self._launches.append(launch)

    def last_tokens(self, requests: Sequence[Request]) -> torch.Tensor:
        """Return the newest token of each request, [n] int64 on the device, or on the host.

        The current stream is ordered after the launches that sample them.
        """
        for launch in self._launches:
            if launch.copied is not None:
                launch.copied.wait(torch.cuda.current_stream(self._device))
        if not any(request.async_tokens for request in requests):
            known = [request.generated[-1] for request in requests]
            return torch.tensor(known, dtype=torch.int64)
        newest = next(launch for launch in reversed(self._launches) if launch.requests)
        if [r.id for r in newest.requests] == [r.id for r in requests]:
            return newest.tokens
        place: dict[int, int] = {}  # in all launches' tokens, laid side by side
        at = 0
        for launch in self._launches:
            for request in launch.requests:
                place[request.id] = at
                at += 1
        host = [0 if request.async_tokens else request.generated[-1] for request in requests]
        # Known tokens follow those of the launches, in the order of the requests.
        rows = [
            place[request.id] if request.async_tokens else at + row
            for row, request in enumerate(requests)
        ]
        uploaded = upload(torch.tensor([host, rows]), self._device)
        launched = [launch.tokens for launch in self._launches]
        return torch.cat([*launched, uploaded[0]])[uploaded[1]]

    def read(self, accept: Accept, count: int | None = None, calls: Calls | None = None) -> None:
        """Wait for the oldest `count` launches (all by default) and hand out their tokens.

        A request that was cancelled or has ended since the launch is passed over. If `accept`
        raises, its token and all after it are handed out by the next call.

        Args:
            accept: takes them.
            count: of launches.
            calls: of several ranks, which must have sampled the same before any token is handed
                out.
        """
        count = len(self) if count is None else count
        if count and calls is not None and calls.compares:
            for launch in islice(self._launches, count):
                if launch.copied is not None:
                    launch.copied.synchronize()
                calls.sampled(launch.host[: len(launch.requests)].tolist())
            calls.confirm()
        for _ in range(count):
            launch = self._launches[0]
            if launch.copied is not None:
                launch.copied.synchronize()
            if launch.taken == 0:
                ended = time.perf_counter() if launch.ended is None else launch.ended
                # Launches overlap: each is charged from where the one before it had ended. One
                # whose texts have all ended may be read any time later.
                if not launch.requests or any(r.finish_reason is None for r in launch.requests):
                    for times in launch.seconds:
                        times.append(ended - max(launch.started, self._ended))
                self._ended = ended
            tokens = launch.host[: len(launch.requests)].tolist()
            while launch.taken < len(tokens):
                request = launch.requests[launch.taken]
                if request.finish_reason is None:
                    accept(request, tokens[launch.taken], launch.logprobs_of(launch.taken))
                launch.taken += 1
                request.async_tokens -= 1
            self._retire()

    def clear(self) -> None:
        """Forget all launches, once their tokens have come; their requests must not go on."""
        while self._launches:
            copied = self._launches[0].copied
            if copied is not None:  # torch does not know of the kernel that writes to the host
                copied.synchronize()
            self._retire()

    def _retire(self) -> None:
        """Drop the oldest launch, whose tokens have come."""
        launch = self._launches.popleft()
        if launch.copied is not None:
            self._free.append((launch.host, launch.mapped))

    def _pinned(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return pinned memory for at least `count` tokens; see `pinned_words`."""
        while self._free:
            host, mapped = self._free.pop()
            if len(host) >= count:
                return host, mapped
        return pinned_words(max(1, -(-count // _BLOCK)) * _BLOCK, self._device)
