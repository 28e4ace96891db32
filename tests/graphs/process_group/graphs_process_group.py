"""What each process of the tests of `CaptureGroup` does, for spawned processes to import."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_processes import hold_store

from ostinato.graphs import BufferSpec, BurstRules, Feed, GraphRunner, StaticBuffers, process_group

SPECS = {"x": BufferSpec((), torch.int64, 0, lambda g, s: torch.randint(9, s, generator=g))}
FAILING = 1  # the rank that fails
SIZES = [1, 2]
# Warm-up calls the step four times, the capture two.
IN_WARM_UP, IN_CAPTURE, IN_VERIFICATION = 2, 5, 7


class SummingStep:
    """Adds up a row of all ranks. Fails at a call, on one rank, before or after that."""

    def __init__(self, group, device, fails_at=0, communicates_first=False):
        self.group, self.device, self.fails_at = group, device, fails_at
        self.communicates_first = communicates_first
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        fails = self.calls == self.fails_at and dist.get_rank() == FAILING
        total = batch.x + 100 * dist.get_rank()
        if self.communicates_first or not fails:
            dist.all_reduce(total, group=self.group)
        if fails:
            raise OverflowError(f"call {self.calls} is too much")
        return {"total": total}


def make_runner(step, group, **options):
    buffers = StaticBuffers(SPECS, max(SIZES), step.device)
    return GraphRunner(step, buffers, group=group, **{"group_timeout_s": 20.0} | options)


def outcome(call: Callable[[], object]) -> dict[str, object]:
    """Return what a call ended with, and how long it took."""
    started = time.monotonic()
    try:
        call()
        error = None
    except Exception as raised:
        error = raised
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "failures": getattr(error, "failures", None),
        "seconds": time.monotonic() - started,
    }


def totals(runner, rank: int) -> list[int]:
    """Return what a run gives for rows that differ between ranks."""
    return runner.run(2, {"x": [1 + rank, 10]})["total"].tolist()


def agree_and_run(group, device, rank):
    runner = make_runner(SummingStep(group, device), group)
    reports = outcome(lambda: runner.capture(SIZES))
    result = totals(runner, rank)
    again = outcome(runner.recapture)
    runner.close()
    return {"capture": reports, "totals": result, "again": again}


def fail_at(call):
    def scenario(group, device, rank):
        # The others' collective of a capture on a CPU is carried out, and would wait.
        on_cpu = device.type == "cpu"
        step = SummingStep(group, device, call, communicates_first=on_cpu and call == IN_CAPTURE)
        runner = make_runner(step, group)
        first = outcome(lambda: runner.capture(SIZES))
        refused = outcome(lambda: totals(runner, rank))
        step.fails_at = 0
        # Where the step's own collectives broke, the group is of no more use.
        again = outcome(lambda: runner.capture(SIZES)) if call == IN_CAPTURE else None
        result = totals(runner, rank) if runner.batch_sizes else None
        runner.close()
        return {"first": first, "refused": refused, "again": again, "totals": result}

    return scenario


def differ_in_verification(group, device, rank):
    frozen = SummingStep(group, device)

    def step(batch):
        outputs = frozen(batch)
        if rank == FAILING:  # a number of Python's, which the graph of a CPU reads anew
            outputs["total"] += frozen.calls
        return outputs

    step.device = device
    runner = make_runner(step, group)
    first = outcome(lambda: runner.capture(SIZES))
    runner.close()
    return {"first": first}


def capture_different_sizes(group, device, rank):
    runner = make_runner(SummingStep(group, device), group)
    first = outcome(lambda: runner.capture([2] if rank == FAILING else SIZES))
    again = outcome(lambda: runner.capture(SIZES))
    result = totals(runner, rank) if runner.batch_sizes else None
    return {"first": first, "again": again, "totals": result}


def come_too_late(group, device, rank):
    runner = make_runner(SummingStep(group, device), group, group_timeout_s=1.0)
    if rank == FAILING:
        time.sleep(2.5)
    first = outcome(lambda: runner.capture(SIZES))
    again = outcome(lambda: runner.capture(SIZES))
    return {"first": first, "again": again}


def die(group, device, rank):
    if rank == FAILING:
        os._exit(3)
    runner = make_runner(SummingStep(group, device), group, group_timeout_s=1.0)
    return {"first": outcome(lambda: runner.capture(SIZES))}


SCENARIOS = {
    "agree": agree_and_run,
    "warm-up": fail_at(IN_WARM_UP),
    "capture": fail_at(IN_CAPTURE),
    "verification": fail_at(IN_VERIFICATION),
    "difference": differ_in_verification,
    "sizes": capture_different_sizes,
    "late": come_too_late,
    "dead": die,
}


def burst_together(group, device, rank):
    rules = BurstRules({"x": Feed("total")}, "total", max_steps=8)
    runner = make_runner(SummingStep(group, device), group, burst=rules)
    first = outcome(lambda: runner.capture(SIZES))
    runner.close()
    return {"first": first}


def tear_down(group, device, rank):
    runner = make_runner(SummingStep(group, device), group)
    runner.capture(SIZES)
    totals(runner, rank)
    closing = outcome(runner.close)
    return {"closing": closing, "destroying": outcome(lambda: dist.destroy_process_group(group))}


# The last one aborts its group.
NCCL_SCENARIOS = {
    "agree": agree_and_run,
    "burst": burst_together,
    "capture": fail_at(IN_CAPTURE),
    "teardown": tear_down,
    "warm-up": fail_at(IN_WARM_UP),
}

# Of gloo: short where a rank has to come out of a collective that the others are not in.
PATIENCE_S = dict.fromkeys(SCENARIOS, 60) | {"warm-up": 4, "verification": 4}


def work(rank, size, port, names, results):
    """Go through the scenarios as one of `size` processes, each with a group of its own."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {name: dist.new_group(timeout=timedelta(seconds=PATIENCE_S[name])) for name in names}
    for name, group in groups.items():
        try:
            result = SCENARIOS[name](group, torch.device("cpu"), rank)
        except Exception:
            result = {"crashed": traceback.format_exc()}
        results.put((name, rank, result))


def work_on_gpus(rank, size, port, names, results):
    """Go through the scenarios with NCCL, as `work` does with gloo."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    process_group._IDLE_S = 2.0
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    # With the device, communicators are made at once, and not in the first warm-up.
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    for name in names:
        group = dist.new_group()
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        try:
            result = NCCL_SCENARIOS[name](group, device, rank)
        except Exception:
            result = {"crashed": traceback.format_exc()}
        results.put((name, rank, result))
    os._exit(0)  # a group that was aborted cannot be destroyed


def run_ranks(target, size, *arguments, seconds=120.0):
    """Start `size` processes as torchrun does, and return what they put: {name: {rank: result}}.

    They are forks of a process that has imported the package once, and done nothing else.
    """
    spawning = multiprocessing.get_context("forkserver")
    spawning.set_forkserver_preload(["ostinato.graphs", "torch.distributed"])
    store = hold_store()
    results = spawning.SimpleQueue()  # written to at once, also by a process that then dies
    processes = [
        spawning.Process(target=target, args=(rank, size, store.port, *arguments, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    collected: dict[str, dict[int, object]] = {}
    deadline = time.monotonic() + seconds
    try:
        while any(process.is_alive() for process in processes) or not results.empty():
            assert time.monotonic() < deadline, f"some ranks hang; until now {collected}"
            if results.empty():
                time.sleep(0.05)
                continue
            name, rank, result = results.get()
            collected.setdefault(name, {})[rank] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return collected
