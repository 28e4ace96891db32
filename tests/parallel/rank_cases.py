"""What each rank of a case does: serves prompts with engines over ranks, and perhaps fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_processes import hold_store

import ostinato.server  # noqa: F401  # once, before the forks
from ostinato.engine import Engine, SamplingParams, StructuredOutput
from ostinato.graphs.errors import RankError
from ostinato.models import cache
from ostinato.models.kv_storage import KVStorage
from ostinato.ops.attention.l2_partition import L2Partition
from ostinato.parallel import Ranks, start_ranks
from ostinato.parallel.channel import Channel
from tiny import KV_CACHES, byte_tokenizer, tiny_llama

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()
PROMPTS = ["a", "some prompt", "a prompt longer than a chunk of eight", "some prompt, shared"]

Tell = Callable[..., None]


class CommunicatingModel:
    """A decoder whose steps sum over ranks, as a sharded one's do; its logits stay the same.

    Args:
        model: of each rank, whole.
        fault: is called before each step.
    """

    def __init__(self, model: Any, communicator: Any, fault: Callable[[str], None]) -> None:
        self._model = model
        self._communicator = communicator
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _met(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens; others where the sum of all ranks is not what it should be."""
        self._fault("step")
        if self._communicator is None:
            return tokens
        total = self._communicator.all_reduce(torch.ones(len(tokens), 4, device=tokens.device))
        wrong = (total != self._communicator.size).any(1)
        # A device that captures cannot be asked.
        assert tokens.is_cuda or not wrong.any()
        return tokens ^ wrong.to(tokens.dtype)

    def __call__(self, tokens: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        return self._model(self._met(tokens), *inputs, **options)

    def logits_to_sample(self, tokens: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        return self._model.logits_to_sample(self._met(tokens), *inputs, **options)

    def hidden(self, tokens: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        return self._model.hidden(self._met(tokens), *inputs, **options)


class Fault:
    """Fails at the n-th time that a place is come to, on one rank.

    Args:
        wanted: `rank`, `place`, `count` and `kind`; None never fails.
        rank: this one.
        device: of this rank. On a GPU a step is a launch of a graph, and so is the place "serving".
    """

    def __init__(
        self, wanted: dict[str, Any] | None, rank: int, device: torch.device = CPU
    ) -> None:
        self.device = device
        self._wanted = wanted if wanted is not None and wanted["rank"] == rank else None
        self._left = 0 if self._wanted is None else self._wanted["count"]
        self.serving = False

    def __call__(self, place: str) -> None:
        if self._wanted is None:
            return
        if place == "step":
            place = "serving" if self.serving else "capture"
            if self.serving and self.device.type == "cuda":
                return
        if place == "launch":
            if not self.serving or self.device.type != "cuda":
                return
            place = "serving"
        if place != self._wanted["place"]:
            return
        self._left -= 1
        if self._left == 0:
            self._fail(self._wanted["kind"])

    def _fail(self, kind: str) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "memory":
            raise torch.OutOfMemoryError("injected: no memory")
        elif kind == "hang":
            time.sleep(1000)
        elif kind == "exit":
            os._exit(7)
        elif kind == "leave":
            sys.exit(7)
        raise {"value": ValueError, "runtime": RuntimeError}[kind]("injected")


def keep_store(port: int) -> None:
    """Hold the store of a case, as torchrun does, until this process is killed."""
    store = hold_store(port)
    signal.pause()
    del store


def run_rank(case: dict[str, Any], report: Path) -> int:
    """Run one rank, and return its exit code."""
    with open(report, "w", buffering=1) as file:

        def tell(**told: object) -> None:
            print(json.dumps(told), file=file)

        if "code" in case:
            return run_code(case["code"], report)
        if "argv" in case:
            return run_command(case, report)
        rank = int(os.environ["RANK"])
        device = torch.device("cuda", rank) if case.get("device") == "cuda" else CPU
        fault = Fault(case.get("fault"), rank, device)
        try:
            fault("start")
            if case.get("alone"):
                SCENARIOS[case["scenario"]](case, None, fault, tell)
            else:
                with start_ranks(device, timeout_s=case["timeout_s"]) as ranks:
                    SCENARIOS[case["scenario"]](case, ranks, fault, tell)
        except BaseException as error:
            traceback.print_exc()
            failures = error.failures if isinstance(error, RankError) else {}
            tell(error=type(error).__name__, message=str(error), failures=failures)
            sys.stderr.flush()
            return 3
        tell(ended=True)
        return 0


def run_code(code: str, report: Path) -> int:
    """Run a program on one rank, and report what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    report.write_text(json.dumps({"printed": printed.getvalue()}))
    return 0


def run_command(case: dict[str, Any], report: Path) -> int:
    """Run the command line on one rank, and report what it prints."""
    from ostinato.cli.main import main

    rank = int(os.environ["RANK"])
    Path(case["pids"], str(rank)).write_text(str(os.getpid()))
    fault = Fault(case.get("fault"), rank)
    receive, received = Channel.receive, iter(range(1 << 30))

    def waiting(channel: Channel) -> bytes:
        fault("idle")
        if next(received) == 5:  # by then a text has begun
            Path(case["pids"], "received").touch()
        return receive(channel)

    Channel.receive = waiting  # type: ignore[method-assign]
    # As `python -m ostinato` does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printed = report.with_suffix(".stdout")
    with open(printed, "w") as file, contextlib.redirect_stdout(file):
        code = main([word if isinstance(word, str) else word[rank] for word in case["argv"]])
    report.write_text(json.dumps({"printed": printed.read_text()}))
    return code


def make_engine(ranks: Ranks | None, fault: Fault, **options: Any) -> Engine:
    fault("load")
    scheme, stored = options.pop("scheme", "plain"), options.pop("cache", "model")
    model = tiny_llama(fault.device, scheme, cache=stored)
    fault("engine")
    communicator = None if ranks is None else ranks.connect(fault.device)
    options = {"max_batch": 3, "page_size": 4, "prefill_chunk": 8, **KV_CACHES[stored], **options}
    decoder: Any = CommunicatingModel(model, communicator, fault)
    engine = Engine(decoder, TOKENIZER, ranks=ranks, **options)
    launched = engine._calls.launched

    def launching(*arguments: Any) -> None:
        fault("launch")
        launched(*arguments)

    engine._calls.launched = launching  # type: ignore[method-assign]
    return engine


def params(temperature: float = 0.8, tokens: int = 12, **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=7 + at, **more)
        for at in range(len(PROMPTS))
    ]


def serve(case: dict[str, Any], ranks: Ranks | None, fault: Fault, tell: Tell) -> None:
    """Generate texts, telling each token as it comes."""
    engine = make_engine(ranks, fault)
    if ranks is not None and ranks.channel is not None:
        watch_receive(ranks.channel, fault)
    if ranks is not None and not ranks.leads:
        watch_capture(engine, fault)
        engine.follow()
        return
    engine.capture([1, 3], progress=False, verify=False)
    fault.serving = True
    for event in engine.stream(PROMPTS, params()):
        tell(request=event.request_id, token=event.token_id)
        fault("caller")
    engine.close()


def watch_capture(engine: Engine, fault: Fault) -> None:
    """Note when a follower has captured."""
    capture = engine.capture

    def captured(*arguments: Any, **options: Any) -> Any:
        report = capture(*arguments, **options)
        fault.serving = True
        return report

    engine.capture = captured  # type: ignore[method-assign]


def watch_receive(channel: Channel, fault: Fault) -> None:
    """Come to the place "idle" whenever a follower waits for the next call."""
    receive = channel.receive

    def waiting() -> bytes:
        fault("idle")
        return receive()

    channel.receive = waiting  # type: ignore[method-assign]


def use_everything(case: dict[str, Any], ranks: Ranks | None, fault: Fault, tell: Tell) -> None:
    """Use each call of an engine, and tell what comes of it."""
    for name, use in USES.items():
        if name in case["skipped"]:
            continue
        options: dict[str, Any] = dict(OPTIONS.get(name, {}))
        engine = make_engine(ranks, fault, **options)
        if ranks is not None and not ranks.leads:
            engine.follow()
            assert not engine._requests, name
            assert engine._closed, name
            continue
        sizes = [1, 2] if name == "parts" else [1, 3]
        engine.capture(sizes, progress=False, verify=name == "greedy")
        tell(use=name, result=use(engine))
        engine.close()


def texts(engine: Engine, **more: Any) -> list[Any]:
    done = engine.generate(PROMPTS, params(**more))
    return [[c.text, list(c.token_ids), str(c.finish_reason)] for c in done]


def cancels(engine: Engine) -> list[Any]:
    pairs = zip(PROMPTS, params(ignore_eos=True), strict=True)
    ids = [engine.submit(prompt, wanted) for prompt, wanted in pairs]
    told: list[Any] = []
    for step in range(100):
        told += [[e.request_id, e.token_id, str(e.finish_reason)] for e in engine.step()]
        if step in (1, 4):
            told.append(engine.cancel(ids[step // 2]).text)
        if engine.idle:
            break
    return [*told, texts(engine)]


def streams(engine: Engine) -> list[Any]:
    told: list[Any] = []
    one, two = (engine.stream(PROMPTS[:2], params()[:2]) for _ in range(2))
    for event, _ in zip(one, range(5), strict=False):
        told.append([event.request_id, event.text])
    del one  # dropped: its requests are cancelled before the next step
    told += [[event.request_id, event.text] for event in two]
    return [*told, texts(engine)]


def preemption(engine: Engine) -> list[Any]:
    found = texts(engine, tokens=40, ignore_eos=True)
    assert engine.stats.preemptions
    return found


def random_seeds(engine: Engine) -> list[Any]:
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=1.0))
    # Nobody knows these texts; that ranks sample alike is what they confirm in each step.
    return [len(done)]


def sleeps(engine: Engine) -> list[Any]:
    before = texts(engine)
    engine.sleep()
    engine.wake(progress=False, verify=False)
    assert texts(engine) == before
    engine.capture([1, 2], progress=False, verify=False)
    return texts(engine)


def processed(engine: Engine) -> list[Any]:
    more = {"logprobs": 2, "frequency_penalty": 0.5, "logit_bias": {65: 3.5}, "min_tokens": 3}
    done = engine.generate(PROMPTS, params(**more))
    values = [[t.logprob for t in c.logprobs or ()] for c in done]
    return [*texts(engine, **more), values, texts(engine)]


def structured(engine: Engine) -> list[Any]:
    forms = [StructuredOutput(choice=["yes", "no, not at all"]), StructuredOutput(regex="[ab]{6}")]
    found = [texts(engine, structured=form) for form in (*forms, forms[0])]
    engine.submit("late", SamplingParams(max_tokens=9, structured=forms[1]))
    engine.step()
    engine.step()
    (request,) = engine._requests.values()
    assert request.matcher is not None
    request.matcher._seconds_left = -1.0  # as if it had taken long, on rank 0
    events = [event for _ in range(3) for event in engine.step()]
    assert [str(e.finish_reason) for e in events if e.finish_reason] == ["error"], events
    return [*found, texts(engine)]


def refusals(engine: Engine) -> list[Any]:
    """Errors of the caller's change nothing, on any rank."""
    told = []
    for call in (
        lambda: engine.submit("", SamplingParams()),
        lambda: engine.submit("a", SamplingParams(stop_token_ids=[9999])),
        lambda: engine.cancel(77),
        lambda: engine.capture([99], progress=False),
        lambda: engine.generate([], SamplingParams()),
    ):
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return [*told, texts(engine)]


USES: dict[str, Callable[[Engine], list[Any]]] = {
    "greedy": lambda engine: texts(engine, temperature=0.0),
    "sampled": texts,
    "parts": texts,
    "cancels": cancels,
    "streams": streams,
    "preemption": preemption,
    "8-bit KV": texts,
    "seeds": random_seeds,
    "sleep": sleeps,
    "processed": processed,
    "structured": structured,
    "refusals": refusals,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "preemption": {"num_pages": 24},
    "8-bit KV": {"cache": "fp8", "scheme": "int8"},
    "processed": {"logits_processing": True},
    "structured": {"logits_processing": True},
}


def fewer_pages(case: dict[str, Any], ranks: Ranks, fault: Fault, tell: Tell) -> None:
    """Every rank has as many pages as the one with the fewest."""
    engine = make_engine(ranks, fault, num_pages=40 - ranks.rank)
    # As they say where their memory is.
    assert ranks._exchange([ranks.rank, 7]) == [[rank, 7] for rank in range(ranks.size)]
    tell(pages=engine.cache.usable_pages)


def different_options(case: dict[str, Any], ranks: Ranks, fault: Fault, tell: Tell) -> None:
    """An engine is refused where ranks have other arguments."""
    make_engine(ranks, fault, max_batch=3 + ranks.rank)


def different_tokens(case: dict[str, Any], ranks: Ranks, fault: Fault, tell: Tell) -> None:
    """One rank samples another token than all others."""
    engine = make_engine(ranks, fault)
    if ranks.rank == case["odd"]:
        calls = engine._calls
        sampled, count = calls.sampled, iter(range(1000))

        def odd(tokens: list[int]) -> None:
            sampled([token + (next(count) == 4) for token in tokens])

        calls.sampled = odd  # type: ignore[method-assign]
    if not ranks.leads:
        engine.follow()
        return
    engine.capture([3], progress=False, verify=False)
    for event in engine.stream(PROMPTS, params()):
        tell(request=event.request_id, token=event.token_id)


class PartitionedKV(KVStorage):
    """Storage whose pages lie in other L2 partitions on each rank's GPU."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.l2_partition = L2Partition((0, 1), 1 + int(os.environ["RANK"]), 1)


def other_partitions(case: dict[str, Any], ranks: Ranks, fault: Fault, tell: Tell) -> None:
    """Find prefixes again and again in caches that are too small for all."""
    cache.KVStorage = PartitionedKV  # type: ignore[misc]  # of this fork
    engine = make_engine(ranks, fault, num_pages=30)
    assert engine.cache.l2_partition is not None
    if not ranks.leads:
        engine.follow()
        return
    engine.capture([1, 3], progress=False, verify=False)
    draw = random.Random(2)
    for _ in range(20):
        prompts = [draw.choice("abcdefgh") * draw.randrange(5, 30) for _ in range(3)]
        for done in engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True)):
            tell(tokens=done.token_ids)
    tell(evictions=engine.cache.evictions, shared=engine.cache.shared_tokens)
    engine.close()


SCENARIOS = {
    "serve": serve,
    "everything": use_everything,
    "pages": fewer_pages,
    "options": different_options,
    "tokens": different_tokens,
    "partitions": other_partitions,
}
