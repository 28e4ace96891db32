"""The example of GraphRunner in a loop of one's own runs as a user would run it."""

import re
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "decode_loop.py"


def test_decode_loop_prints_report_and_tokens(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "4 batch sizes captured on" in out
    assert out.count("bit-equal") == 4
    assert "at padding" not in out
    continued = re.findall(r"^\[[\d, ]+\] -> \[([\d, ]+)\]$", out, flags=re.MULTILINE)
    assert [len(tokens.split(",")) for tokens in continued] == [4, 8, 12, 16, 20, 24]


def test_example_fits_on_a_page():
    assert len(EXAMPLE.read_text().splitlines()) <= 80
