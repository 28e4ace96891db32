"""Texts that grow at once stay readable."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cli.display import TextDisplay


class Watched(io.StringIO):
    """Text that remembers what had been flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_one_text_is_shown_alone_token_by_token() -> None:
    out = Watched()
    display = TextDisplay(["Once"], out)
    for piece, shown in ((" upon", " upon"), ("", " upon"), (" a", " upon a")):
        display.add(0, piece, finished=False)
        assert out.flushed == shown
    display.add(0, " time", finished=True)
    assert out.flushed == " upon a time\n"


def test_later_texts_wait_for_their_turn() -> None:
    out = Watched()
    display = TextDisplay(["one", "two", "three"], out)
    display.add(1, "2", finished=True)
    display.add(2, "3", finished=False)
    assert out.flushed == "==> 1/3: one\n"
    display.add(0, "1", finished=False)
    assert out.flushed == "==> 1/3: one\n1"
    display.add(0, "", finished=True)
    assert out.flushed == "==> 1/3: one\n1\n\n==> 2/3: two\n2\n\n==> 3/3: three\n3"
    display.add(2, "!", finished=True)
    assert out.flushed.endswith("three\n3!\n")


def test_headers_have_one_line_of_limited_length() -> None:
    out = Watched()
    display = TextDisplay(["a\n\tb", "x" * 500], out)
    display.add(0, "", finished=True)
    display.add(1, "", finished=True)
    first, second = [line for line in out.flushed.splitlines() if line.startswith("==>")]
    assert first == "==> 1/2: a b"
    assert second.endswith("x…")
    assert len(second) < 100


def test_texts_cut_short_are_shown_as_far_as_they_got() -> None:
    out = Watched()
    display = TextDisplay(["one", "two", "three", "four"], out)
    display.add(0, "1", finished=False)
    display.add(2, "3", finished=False)
    display.add(3, "", finished=True)
    display.cut_short()
    assert out.flushed == "==> 1/4: one\n1\n\n==> 3/4: three\n3\n\n==> 4/4: four\n\n"


def test_one_text_cut_short_before_its_first_token() -> None:
    out = Watched()
    TextDisplay(["one"], out).cut_short()
    assert out.flushed == ""


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1), min_size=1, max_size=5), st.randoms())
def test_the_order_of_arrival_does_not_show(texts: list[list[str]], random) -> None:
    out = io.StringIO()
    display = TextDisplay([str(index) for index in range(len(texts))], out)
    arrivals = [index for index, text in enumerate(texts) for _ in text]
    random.shuffle(arrivals)
    left = [list(text) for text in texts]
    for index in arrivals:
        piece = left[index].pop(0)
        display.add(index, piece, finished=not left[index])
    if len(texts) == 1:
        assert out.getvalue() == "".join(texts[0]) + "\n"
    else:
        shown = [
            f"==> {index + 1}/{len(texts)}: {index}\n{''.join(text)}\n"
            for index, text in enumerate(texts)
        ]
        assert out.getvalue() == "\n".join(shown)


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_shown_twice(count: int) -> None:
    out = io.StringIO()
    display = TextDisplay(["p"] * count, out)
    for index in range(count):
        display.add(index, f"<{index}>", finished=True)
    display.cut_short()
    assert all(out.getvalue().count(f"<{index}>") == 1 for index in range(count))
