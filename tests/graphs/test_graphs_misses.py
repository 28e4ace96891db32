"""Runs for which no graph is there: called eagerly or captured, within limits, and counted."""

import pytest
import torch
from graphs_toys import toy_inputs

from ostinato.graphs import CaptureError, Key, Misses, Variant, VerificationError

DRAFT = Variant(q_len=4)


def tokens_of(runner, n, **options):
    """Run `n` rows and return the toy's tokens, with what they should be."""
    inputs = toy_inputs(n)
    got = runner.run(n, inputs, **options)["tokens"]
    return got.tolist(), [2 * token + 1 for token in inputs["tokens"].tolist()]


@pytest.mark.parametrize("action", ["eager", "capture"])
def test_a_miss_is_run_all_the_same(action, step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 2], misses=Misses(action))
    assert runner.max_batch_size == 8
    for n in (1, 2, 3, 5, 8, 3):
        got, expected = tokens_of(runner, n)
        assert got == expected


def test_eager_falls_are_counted_and_capture_nothing(step, make_runner):
    runner = make_runner(step)
    runner.capture([2], misses=Misses("eager"))
    before = len(step.calls)
    for n in (3, 4, 7):
        tokens_of(runner, n)
    assert step.calls[before:] == [4, 4, 8]
    tokens_of(runner, 1)  # the graph of 2 rows holds it
    assert runner.keys == (Key(2),)
    stats = runner.stats()
    assert (stats.hits, stats.eager_falls, stats.lazy_captures) == (1, 3, 0)
    assert [(b.batch_size, b.hits, b.eager, b.rows) for b in stats.buckets] == [
        (1, 0, 0, 0),
        (2, 1, 0, 1),
        (4, 0, 2, 7),
        (8, 0, 1, 7),
    ]
    assert (stats.rows, stats.padded_rows) == (15, 3)


def test_a_miss_is_captured_once(step, make_runner):
    runner = make_runner(step)
    runner.capture([8], misses=Misses("capture"))
    assert runner.keys == (Key(8),)
    for n in (3, 4, 3):
        tokens_of(runner, n)
    assert runner.keys == (Key(4), Key(8))
    stats = runner.stats()
    assert (stats.hits, stats.eager_falls, stats.lazy_captures) == (3, 0, 1)


def test_without_misses_nothing_is_captured_in_a_run(step, make_runner):
    runner = make_runner(step)
    runner.capture([2])
    before = len(step.calls)
    with pytest.raises(ValueError, match="n: got 3 rows, expected 1 to 2"):
        tokens_of(runner, 3)
    assert len(step.calls) == before
    assert runner.keys == (Key(2),)


def test_what_misses_may_run_is_warmed_up_by_capture(step, make_runner):
    runner = make_runner(step)
    runner.capture([2], misses=Misses("capture", [2, 4, 8]), verify=False)
    assert step.calls == [8, 8, 4, 4, 2, 2, 2]


def test_misses_alone(step, make_runner):
    runner = make_runner(step)
    report = runner.capture([], misses=Misses("capture", max_graphs=1))
    assert report.graphs == ()
    assert runner.keys == ()
    for n in (1, 8, 1):
        got, expected = tokens_of(runner, n)
        assert got == expected
    assert runner.keys == (Key(1),)


def test_the_graph_run_longest_ago_is_released(step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 2], misses=Misses("capture", max_graphs=3))
    tokens_of(runner, 4)
    assert runner.keys == (Key(1), Key(2), Key(4))
    tokens_of(runner, 1)  # so that 2 is the one run longest ago
    got, expected = tokens_of(runner, 8)
    assert got == expected
    assert runner.keys == (Key(1), Key(4), Key(8))
    got, expected = tokens_of(runner, 2)  # takes the place of 4
    assert got == expected
    assert runner.keys == (Key(1), Key(2), Key(8))
    stats = runner.stats()
    assert (stats.evictions, stats.lazy_captures, stats.hits) == (2, 3, 4)


def test_limits_of_each_variant(make_runner):
    runner = make_runner(lambda batch: {"tokens": 2 * batch.tokens + 1})
    runner.capture([1], misses=Misses("capture", {Variant(): None, DRAFT: [1, 2]}))
    got, expected = tokens_of(runner, 2, variant=DRAFT)
    assert got == expected
    assert runner.keys == (Key(1), Key(2, DRAFT))
    with pytest.raises(ValueError, match="n: got 3 rows, expected 1 to 2"):
        tokens_of(runner, 3, variant=DRAFT)


def test_bad_inputs_of_a_miss_capture_nothing(step, make_runner):
    runner = make_runner(step)
    runner.capture([2], misses=Misses("capture"))
    before = len(step.calls)
    with pytest.raises(ValueError, match=r"inputs\['tokens'\]: got shape \(2,\), expected \(3,\)"):
        runner.run(3, toy_inputs(2))
    assert len(step.calls) == before
    assert runner.keys == (Key(2),)


@pytest.mark.parametrize("verify", [True, False])
def test_a_late_capture_reads_views_of_the_last_outputs(verify, make_runner):
    runner = make_runner(lambda batch: {"tokens": 2 * batch.tokens + 1})
    runner.capture([4], misses=Misses("capture", [1, 2, 4], verify=verify))
    first = runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]})["tokens"]
    second = runner.run(2, toy_inputs(2) | {"tokens": first[:2]})["tokens"]
    assert runner.stats().lazy_captures == 1
    assert second.tolist() == [7, 11]


def test_a_miss_that_cannot_be_captured_leaves_the_others(step, make_runner):
    ready = False

    def fragile_step(batch):
        if batch.size == 4 and ready:
            raise ValueError("no room")
        return step(batch)

    runner = make_runner(fragile_step)
    runner.capture([2], misses=Misses("capture"))
    ready = True
    with pytest.raises(CaptureError, match="could not warm up batch size 4: ValueError: no room"):
        tokens_of(runner, 3)
    got, expected = tokens_of(runner, 2)
    assert got == expected
    ready = False
    got, expected = tokens_of(runner, 3)
    assert got == expected
    assert runner.stats().lazy_captures == 1


def test_an_eager_step_that_raises_is_not_counted(step, make_runner):
    def fragile_step(batch):
        if running:
            raise ValueError("no luck")
        return step(batch)

    running = False
    runner = make_runner(fragile_step)
    runner.capture([2], misses=Misses("eager"))
    running = True
    with pytest.raises(ValueError, match="no luck"):
        tokens_of(runner, 3)
    assert runner.stats().eager_falls == 0


@pytest.mark.parametrize("verify", [True, False])
def test_verification_of_late_captures_is_asked_for(verify, make_runner):
    def step(batch):
        noise = torch.rand_like(batch.hidden) if batch.size == 4 else batch.hidden
        return {"tokens": 2 * batch.tokens + 1, "noise": noise + 0}

    runner = make_runner(step)
    runner.capture([2], misses=Misses("capture", verify=verify))
    if verify:
        with pytest.raises(VerificationError, match="batch size 4 with 1 real rows"):
            tokens_of(runner, 3)
    got, expected = tokens_of(runner, 2)
    assert got == expected
    if not verify:
        got, expected = tokens_of(runner, 3)
        assert got == expected


def test_recapture_forgets_what_runs_captured(step, make_runner):
    runner = make_runner(step)
    runner.capture([2], misses=Misses("capture"))
    tokens_of(runner, 3)
    runner.recapture()
    assert runner.keys == (Key(2),)
    got, expected = tokens_of(runner, 3)
    assert got == expected


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"action": "wait"}, ValueError, "action: got 'wait'"),
        ({"action": "eager", "max_graphs": 3}, ValueError, "max_graphs: expected None"),
        ({"action": "capture", "max_graphs": 0}, ValueError, "max_graphs: got 0"),
        ({"action": "capture", "max_graphs": 1.5}, TypeError, "max_graphs: got 1.5"),
    ],
)
def test_bad_misses(arguments, error, match):
    with pytest.raises(error, match=match):
        Misses(**arguments)


@pytest.mark.parametrize(
    ("sizes", "misses", "error", "match"),
    [
        ([1, 2], Misses("capture", max_graphs=1), ValueError, "expected at least the 2 graphs"),
        ([1], Misses("capture", [3, 2]), ValueError, r"corrected: \[2, 3\]"),
        ([1], Misses("capture", [9]), ValueError, "max_batch=8"),
        ([1], "capture", TypeError, "misses: got str"),
        ({DRAFT: []}, Misses("eager", [1]), ValueError, "got none for the variant q_len 4"),
    ],
)
def test_bad_misses_of_a_capture(sizes, misses, error, match, step, make_runner):
    runner = make_runner(step)
    with pytest.raises(error, match=match):
        runner.capture(sizes, misses=misses)
    assert step.calls == []
