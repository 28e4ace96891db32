"""What is counted and timed, and how Prometheus reads it."""

import faulthandler
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from graphs_toys import SPECS, toy_inputs
from hypothesis import given
from hypothesis import strategies as st

from forks import in_a_fork
from ostinato.graphs import GraphError, GraphRunner, Key, Misses, StaticBuffers, Variant
from ostinato.graphs.metrics.histogram import BOUNDS_US, Histogram, HistogramBuilder
from ostinato.graphs.metrics.prometheus import Metric, to_text
from ostinato.graphs.metrics.replay_observer import ReplayObserver

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)$')


@given(st.lists(st.floats(0, 2e6), max_size=50))
def test_a_histogram_counts_every_time_in_its_class(times):
    builder = HistogramBuilder()
    for time in times:
        builder.add(time)
    histogram = builder.build()
    assert histogram.count == len(times)
    for index, bound in enumerate(BOUNDS_US):
        assert sum(histogram.counts[: index + 1]) == sum(time <= bound for time in times)
    assert histogram.mean == pytest.approx(sum(times) / len(times) if times else 0.0)


def test_bounds_grow_and_reach_half_a_second():
    assert list(BOUNDS_US) == sorted(BOUNDS_US)
    assert (BOUNDS_US[0], BOUNDS_US[-1]) == (10.0, 5e5)


def test_replays_are_timed_only_when_asked_for(step, make_runner, device):
    runner = make_runner(step)
    runner.capture([4])
    runner.run(2, toy_inputs(2))
    assert runner.stats().replay_us is None
    runner.observe(replay_times=True)
    for _ in range(3):
        runner.run(2, toy_inputs(2))
    if device.type == "cuda":
        torch.cuda.synchronize()
    times = runner.stats().replay_us
    assert (times.count, times.missed) == (3, 0)
    assert times.total > 0
    runner.observe()
    runner.run(2, toy_inputs(2))
    assert runner.stats().replay_us is None
    assert runner.stats().hits == 5


def test_replays_that_cannot_be_timed_are_counted_as_missed():
    replayed = []
    graph = SimpleNamespace(replay=lambda: replayed.append(1))
    timer = SimpleNamespace(replay=lambda graph: graph.replay(), finished=list)
    observer = ReplayObserver(timer, nvtx=False)
    observer.replay(Key(1), graph)
    assert replayed == [1]
    assert observer.replay_us() == Histogram(missed=1)


@pytest.mark.parametrize("outer", ["stats", "replay"])
def test_a_signal_handler_may_read_times_being_collected(outer):
    times, seen = [10.0, 20.0], []

    class Timer:
        def replay(self, graph):
            return True

        def finished(self):
            if not seen:
                seen.append(observer.replay_us())  # as a handler does, in the same thread
            return [times.pop() for _ in range(len(times))]

    observer = ReplayObserver(Timer(), nvtx=False)
    calls = {"stats": observer.replay_us, "replay": lambda: observer.replay(Key(1), None)}
    thread = threading.Thread(target=calls[outer], daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert (seen[0].count, observer.replay_us().count) == (0, 2)


def test_times_in_a_fork_are_those_that_were_collected_before_it():
    times = [[3.0, 5.0]]

    def finished():
        assert times, "the device cannot be asked in a fork"
        return times.pop()

    observer = ReplayObserver(SimpleNamespace(finished=finished), nvtx=False)
    before = observer.replay_us()
    assert before.count == 2

    def child():
        assert observer.replay_us() == before

    # No thread of the parent goes on in its child to release this.
    holder = threading.Thread(target=observer._lock.acquire)
    holder.start()
    holder.join()
    assert in_a_fork(child) == "nothing"


def test_stats_do_not_wait_for_a_replay():
    def step(batch):
        if observed:
            seen.append(runner.stats().replay_us.count)
            thread = threading.Thread(target=lambda: seen.append(runner.stats().replay_us.count))
            thread.start()
            thread.join(timeout=30)
        return batch.tokens + 0

    observed, seen = False, []
    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([2])
    runner.observe(replay_times=True)
    observed = True
    for _ in range(2):
        faulthandler.dump_traceback_later(60, exit=True)  # rather than hang
        runner.run(1, toy_inputs(1))
        faulthandler.cancel_dump_traceback_later()
    assert seen == [0, 0, 1, 1]
    assert runner.stats().replay_us.count == 2


def test_a_replay_does_not_wait_for_who_asks_for_statistics():
    asked, answer = threading.Event(), threading.Event()

    def finished():
        asked.set()
        answer.wait(30)
        return []

    timer = SimpleNamespace(replay=lambda graph: True, finished=finished)
    observer = ReplayObserver(timer, nvtx=False)
    thread = threading.Thread(target=observer.replay_us)
    thread.start()
    assert asked.wait(30)
    replays = threading.Thread(target=observer.replay, args=(Key(1), None))
    replays.start()
    replays.join(timeout=5)
    waited = replays.is_alive()
    answer.set()
    thread.join()
    replays.join()
    assert not waited


def test_a_capture_begins_all_counts_anew(step, make_runner):
    runner = make_runner(step)
    runner.capture([2])
    runner.observe(replay_times=True)
    runner.run(1, toy_inputs(1))
    runner.recapture()
    stats = runner.stats()
    assert (stats.hits, stats.replay_us.count) == (0, 0)
    runner.sleep()
    assert runner.stats().buckets == ()
    runner.wake()
    runner.run(1, toy_inputs(1))
    assert runner.stats().hits == 1
    assert runner.stats().replay_us is not None


def test_nvtx_ranges_are_named_after_the_key(step, make_runner, monkeypatch):
    ranges = []
    fake = SimpleNamespace(range_push=ranges.append, range_pop=lambda: ranges.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    runner = make_runner(step)
    runner.capture([4])
    runner.run(2, toy_inputs(2))
    assert ranges == []
    runner.observe(nvtx=True)
    del ranges[:]  # of the trial
    runner.run(2, toy_inputs(2))
    assert ranges == ["replay batch size 4", "pop"]
    assert runner.stats().replay_us is None


def test_a_torch_without_nvtx_is_said_so(step, make_runner, monkeypatch):
    def refuse(name):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=refuse))
    runner = make_runner(step)
    with pytest.raises(GraphError, match="nvtx: this torch has none: NVTX functions not"):
        runner.observe(nvtx=True)
    runner.capture([4])
    runner.run(2, toy_inputs(2))


def samples(text):
    """Return the samples of Prometheus' text, and check that every line is one or a comment."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = SAMPLE.match(line).groups()
            found[name, labels or ""] = float(value)
    return found


def test_prometheus_text_says_what_the_stats_say(make_runner):
    runner = make_runner(lambda batch: batch.tokens + 0)
    runner.capture({Variant(): [2], Variant(4, "draft"): [2]}, misses=Misses("eager"))
    runner.observe(replay_times=True)
    for n in (1, 2, 8):
        runner.run(n, toy_inputs(n))
    text = runner.stats().to_prometheus({"model": 'a "b"\\'})
    assert "# TYPE ostinato_graph_runs_total counter" in text
    assert "# TYPE ostinato_graph_replay_seconds histogram" in text
    got = samples(text)
    model = r'model="a \"b\"\\",'
    two = model + 'batch_size="2",q_len="1",variant=""'
    eight = model + 'batch_size="8",q_len="1",variant=""'
    assert got["ostinato_graph_runs_total", f'{two},served="replay"'] == 2
    assert got["ostinato_graph_runs_total", f'{eight},served="eager"'] == 1
    assert got["ostinato_graph_rows_total", f'{two},kind="real"'] == 3
    assert got["ostinato_graph_rows_total", f'{two},kind="padding"'] == 1
    assert got["ostinato_graph_evictions_total", model.rstrip(",")] == 0
    draft = model + 'batch_size="2",q_len="4",variant="draft"'
    assert got["ostinato_graph_runs_total", f'{draft},served="replay"'] == 0


def test_prometheus_text_of_histograms_is_cumulative():
    builder = HistogramBuilder()
    for time in (5.0, 15.0, 15.0, 1e7):
        builder.add(time)
    metric = Metric("t_seconds", "histogram", "Times.")
    metric.add_histogram(builder.build(), scale=1e-6)
    text = to_text([metric], {})
    assert text.startswith("# HELP t_seconds Times.\n# TYPE t_seconds histogram\n")
    got = samples(text)
    assert got["t_seconds_bucket", 'le="1e-05"'] == 1
    assert got["t_seconds_bucket", 'le="2e-05"'] == 3
    assert got["t_seconds_bucket", 'le="0.5"'] == 3
    assert got["t_seconds_bucket", 'le="+Inf"'] == got["t_seconds_count", ""] == 4
    assert got["t_seconds_sum", ""] == pytest.approx(10.000035)


@pytest.mark.parametrize("label", ["two words", "", "9", "batch_size", "le"])
def test_labels_that_cannot_be_used(label, step, make_runner):
    runner = make_runner(step)
    runner.capture([2])
    runner.observe(replay_times=True)
    with pytest.raises(ValueError, match="labels: got the name"):
        runner.stats().to_prometheus({label: "x"})


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ({"rank": 0}, r"labels\['rank'\]: got 0, expected a string"),
        ({0: "a"}, "labels: got the name 0, expected a string"),
        ("rank", "labels: got str, expected a mapping"),
    ],
)
def test_labels_of_the_wrong_kind(labels, match, step, make_runner):
    with pytest.raises(TypeError, match=match):
        make_runner(step).stats().to_prometheus(labels)


def test_stats_of_a_runner_without_graphs(step, make_runner):
    runner = make_runner(step)
    assert runner.stats().to_prometheus().count("\n") == 9
    assert runner.stats().eager_falls == 0
