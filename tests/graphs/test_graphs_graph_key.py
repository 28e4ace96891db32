"""Variants: a graph of one never serves another, and each has its own batch sizes."""

import json

import pytest
import torch
from graphs_toys import toy_inputs

from ostinato.graphs import CaptureError, Key, NotCapturedError, Variant

DRAFT = Variant(q_len=4, name="draft")
GREEDY = Variant(name="greedy")
ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


def telling_step(batch):
    """Return what a launch would freeze of the variant."""
    return batch.tokens * 100 + batch.variant.q_len * 10 + len(batch.variant.name)


def test_each_variant_is_served_by_its_own_graph(make_runner):
    runner = make_runner(telling_step)
    runner.capture({Variant(): [1, 8], DRAFT: [2], GREEDY: None})
    assert runner.run(1, ONE_ROW).tolist() == [110]
    assert runner.run(1, ONE_ROW, variant=DRAFT).tolist() == [145]
    assert runner.run(1, ONE_ROW, variant=GREEDY).tolist() == [116]
    assert runner.batch_sizes == (1, 8)
    assert [runner.bucket_for(2, variant) for variant in (Variant(), DRAFT, GREEDY)] == [8, 2, 2]
    assert runner.keys[:3] == (Key(1), Key(8), Key(2, DRAFT))
    counted = {(b.batch_size, b.q_len, b.variant): b.hits for b in runner.stats().buckets if b.hits}
    assert counted == {(1, 1, ""): 1, (2, 4, "draft"): 1, (1, 1, "greedy"): 1}


def test_limits_are_those_of_the_variant(make_runner):
    runner = make_runner(telling_step)
    runner.capture({Variant(): [1, 8], DRAFT: [2]})
    with pytest.raises(ValueError, match="n: got 3 rows, expected 1 to 2, the largest captured"):
        runner.run(3, toy_inputs(3), variant=DRAFT)
    assert runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]}).tolist() == [110, 210, 310]
    assert runner.max_batch_size == 8


def test_a_variant_that_was_not_captured_is_refused(make_runner):
    runner = make_runner(telling_step)
    runner.capture({DRAFT: [2]})
    match = r"variant: got default, expected one of \[\"q_len 4, 'draft'\"\]"
    with pytest.raises(ValueError, match=match):
        runner.run(1, ONE_ROW)
    with pytest.raises(ValueError, match="variant: got 'greedy'"):
        runner.bucket_for(1, GREEDY)
    assert runner.batch_sizes == ()
    assert runner.max_batch_size == 2
    assert runner.run(1, ONE_ROW, variant=DRAFT).tolist() == [145]


def test_captures_are_largest_first_in_tokens(make_runner):
    calls = []

    def step(batch):
        calls.append((batch.size, batch.variant.q_len))
        return batch.tokens + 0

    make_runner(step).capture({Variant(): [1, 8], Variant(4): [1, 4]}, verify=False)
    largest_first = [(4, 4), (8, 1), (1, 4), (1, 1)]
    assert calls == [call for call in largest_first for _ in range(2)] + largest_first


def test_the_report_names_variants(make_runner):
    runner = make_runner(telling_step)
    report = runner.capture({Variant(): [2], DRAFT: [2]})
    assert str(report).startswith("2 graphs captured on ")
    header, default, draft = str(report).splitlines()[1:4]
    assert header.split()[:3] == ["batch", "q_len", "variant"]
    assert default.split()[:3] == ["2", "-", "-"]
    assert draft.split()[:3] == ["2", "4", "draft"]
    graphs = json.loads(report.to_json())["graphs"]
    assert [(graph["q_len"], graph["variant"]) for graph in graphs] == [(1, ""), (4, "draft")]
    assert report.graphs[1].key == Key(2, DRAFT)


def test_failures_name_the_variant(make_runner):
    def step(batch):
        if batch.variant == DRAFT:
            raise KeyError("boom")
        return batch.tokens + 0

    runner = make_runner(step)
    match = "could not warm up batch size 2, q_len 4, 'draft': KeyError"
    with pytest.raises(CaptureError, match=match):
        runner.capture({Variant(): [2], DRAFT: [2]})
    runner.capture([2])
    assert runner.run(1, ONE_ROW).tolist() == [1]


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ({}, ValueError, "batch_sizes: got no variant"),
        ({DRAFT: []}, ValueError, "corrected: "),
        ({DRAFT: [2, 1]}, ValueError, r"corrected: \[1, 2\]"),
        ({DRAFT: 2}, TypeError, "batch_sizes: got 2, expected several integers"),
        ({4: [1]}, TypeError, "batch_sizes: got 4, expected a Variant"),
        ({Variant(0): [1]}, ValueError, "batch_sizes.q_len: got 0, expected at least 1"),
        ({Variant(True): [1]}, TypeError, "batch_sizes.q_len: got True"),
        ({Variant(name=3): [1]}, TypeError, "batch_sizes.name: got 3"),
    ],
)
def test_bad_variants_keep_what_was_captured(sizes, error, match, step, make_runner):
    runner = make_runner(step)
    with pytest.raises(error, match=match):
        runner.capture(sizes)
    with pytest.raises(NotCapturedError):
        runner.run(1, ONE_ROW)
    runner.capture([2])
    with pytest.raises(error, match=match):
        runner.capture(sizes)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_recapture_repeats_every_variant(make_runner):
    runner = make_runner(telling_step)
    runner.capture({Variant(): [1], DRAFT: [2]})
    assert [graph.key for graph in runner.recapture().graphs] == [Key(1), Key(2, DRAFT)]
    assert runner.run(1, ONE_ROW, variant=DRAFT).tolist() == [145]


def test_outputs_of_variants_may_have_other_shapes(make_runner):
    def step(batch):
        return batch.tokens[:, None].expand(-1, batch.variant.q_len) + 0

    runner = make_runner(step)
    runner.capture({Variant(): [2], Variant(3): [2]})
    assert runner.run(1, ONE_ROW).shape == (1, 1)
    assert torch.equal(runner.run(1, ONE_ROW, variant=Variant(3)).cpu(), torch.ones(1, 3).long())


def test_a_variant_that_cannot_be_hashed_is_named(step, make_runner, tmp_path):
    runner = make_runner(step)
    runner.capture([2])
    for call in (
        lambda: runner.run(1, ONE_ROW, variant=[1]),
        lambda: runner.bucket_for(1, [1]),
        lambda: runner.dump(2, tmp_path / "step.dot", variant=[1]),
    ):
        with pytest.raises(TypeError, match=r"variant: got \[1\], expected a Variant"):
            call()
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
