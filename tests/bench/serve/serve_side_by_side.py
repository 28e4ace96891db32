"""Joins what one load showed of our server and of a peer's, on one card: rows of serve.json.

    python tests/bench/serve/serve_side_by_side.py --out F --dtype int8 --ours FILE ... \
        [--theirs FILE ...] [--engine FILE] [--note NAME=VALUE ...]

OURS and THEIRS are documents of `bench serve`, THEIRS with the peer's name and version as `--impl`,
such as vllm_0.33.0. A row of ours with one of theirs of the same case has `peer`, `ratio` (of the
output tokens per second, ours over theirs), `first_p50_ratio` and `between_p99_ratio`. A row of
a decode step in the server has that of ENGINE, a document of `bench engine`, as its peer. Notes are
fields of every row, of what the servers had in common. Rows that F has of other dtypes and cases
stay; those of another commit name it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_P50, _P99 = 0, 2  # places among the percentiles of a row
_HEAD = ("gpu", "versions", "commit")


def joined(ours: Sequence[Row], theirs: Sequence[Row], engine: Sequence[Row]) -> list[Row]:
    """Return the peer's row and ours of each case, in the order of ours.

    Raises:
        ValueError: for a case that is there twice, or a row in which requests have failed.
    """
    loads, steps = _by_case(theirs, "serve"), _by_case(engine, "engine")
    rows = []
    for mine in [*_by_case(ours, "serve").values(), *_by_case(ours, "step").values()]:
        if mine["section"] == "step":
            rows.append(mine | _of_engine(mine, steps.get(mine["case"])))
            continue
        their = loads.get(mine["case"])
        rows += [] if their is None else [their]
        rows.append(mine | ({} if their is None else _compared(mine, their)))
    return rows


def _by_case(rows: Sequence[Row], section: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if row["section"] != section:
            continue
        if row["case"] in found:
            raise ValueError(f"{row['case']}: got two rows of {row['impl']}, expected one")
        if row.get("failed"):
            raise ValueError(
                f"{row['case']}: {row['failed']} requests of {row['impl']} have failed"
            )
        found[row["case"]] = row
    return found


def _compared(mine: Row, their: Row) -> Row:
    if mine["requests"] != their["requests"]:
        raise ValueError(
            f"{mine['case']}: got {mine['requests']} and {their['requests']} requests, "
            "expected one load"
        )
    return {
        "peer": their["impl"],
        "ratio": round(mine["output_tokens_s"] / their["output_tokens_s"], 3),
        "first_p50_ratio": round(mine["first_ms"][_P50] / their["first_ms"][_P50], 3),
        "between_p99_ratio": round(mine["between_ms"][_P99] / their["between_ms"][_P99], 3),
    }


def _of_engine(mine: Row, engine: Row | None) -> Row:
    if engine is None:
        return {}
    return {
        "peer": f"{engine['impl']} bench engine",
        "peer_us": engine["us"],
        "ratio": round(mine["us"] / engine["us"], 3),
    }


def kept(file: Path, rows: Sequence[Row], commit: str) -> list[Row]:
    """Return the rows of a results file whose dtype or case `rows` do not have."""
    if not file.exists():
        return []
    document = json.loads(file.read_text())
    earlier = {} if document["commit"] == commit else {"commit": document["commit"]}
    new = {(row["dtype"], row["section"], row["case"]) for row in rows}
    return [
        earlier | row
        for row in document["rows"]
        if (row["dtype"], row["section"], row["case"]) not in new
    ]


def _read(files: Sequence[Path], head: Row | None) -> tuple[Row | None, list[Row]]:
    """Return the heads of documents, which must be of one card and commit, and all rows."""
    rows = []
    for file in files:
        document = json.loads(file.read_text())
        own = {name: document[name] for name in _HEAD}
        head = head or own
        if own["gpu"] != head["gpu"] or own["commit"] != head["commit"]:
            raise SystemExit(
                f"{file}: got {own['gpu']}, {own['commit']}, the others have {head['gpu']}, "
                f"{head['commit']}"
            )
        rows += document["rows"]
    return head, rows


def _notes(given: Sequence[str]) -> Row:
    pairs = [note.partition("=")[::2] for note in given]
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and print the rows that are compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--ours", type=Path, nargs="+", required=True)
    parser.add_argument("--theirs", type=Path, nargs="*", default=[])
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--note", nargs="*", default=[])
    args = parser.parse_args(argv)
    head, ours = _read(args.ours, None)
    head, theirs = _read(args.theirs, head)
    head, engine = _read([] if args.engine is None else [args.engine], head)
    assert head is not None
    common = {"dtype": args.dtype, **_notes(args.note)}
    rows = [row | common for row in joined(ours, theirs, engine)]
    rows = kept(args.out, rows, head["commit"]) + rows
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    body = ",\n".join("  " + json.dumps(row) for row in rows)
    args.out.write_text("{\n" + "".join(f"{f},\n" for f in fields) + f'"rows": [\n{body}\n]\n}}\n')
    for row in rows:
        if "ratio" in row:
            more = [row.get(name) for name in ("first_p50_ratio", "between_p99_ratio")]
            print(row["dtype"], row["case"], row["ratio"], *[each for each in more if each])


if __name__ == "__main__":
    main()
