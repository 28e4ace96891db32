"""Joins times of our engine with those of vLLM's, taken on one card in one call: a results file.

    python tests/side_by_side.py --out F DTYPE OURS THEIRS [DTYPE OURS THEIRS ...]

OURS is a document of `bench engine --lm-head bf16`; THEIRS says `rows` of a batch and milliseconds
a step, `first` of milliseconds to the first tokens of a batch, `versions` and `phases` in seconds.
Both output projections have 16 bits, so that the same work is compared. Rows of other dtypes that
F has stay; those of another commit name it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SECTIONS = {"engine": "step", "first_token": "first_token"}


def joined(dtype: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of both in turn; ours say which peer they are compared with, and the ratio."""
    name = f"vllm_{theirs['versions']['vllm']}"
    times = {("engine", row["batch"]): row["ms_step"] * 1e3 for row in theirs["rows"]}
    times |= {("first_token", row["batch"]): row["ms"] * 1e3 for row in theirs["first"]}
    rows = []
    for row in ours["rows"]:
        if row["section"] not in _SECTIONS:
            continue
        batch = int(row["case"].split()[1].removeprefix("b"))
        common = {
            "case": row["case"],
            "section": _SECTIONS[row["section"]],
            "dtype": dtype,
            "head": "bf16",
        }
        their = times.get((row["section"], batch))
        mine = {**common, "impl": row["impl"], "us": row["us"]}
        if their is not None:
            rows.append({**common, "impl": name, "us": round(their, 1)})
            mine |= {"peer": name, "ratio": round(row["us"] / their, 3)}
        rows.append(mine)
    (startup,) = (row for row in ours["rows"] if row["section"] == "startup")
    after_loading = startup["engine_s"] + startup["capture_s"]
    case = {"case": startup["case"], "section": "startup", "dtype": dtype, "head": "bf16"}
    phases = theirs["phases"]
    their_s = phases["LLM_init_s"] - phases["load_model_s"] - phases["init_device_s"]
    rows.append({**case, "impl": name, "us": round(their_s * 1e6)})
    rows.append({**case, "impl": startup["impl"], "us": round(after_loading * 1e6)})
    return rows


def kept(file: Path, dtypes: Sequence[str], commit: str) -> list[dict[str, Any]]:
    """Return the rows of a results file that are of none of these dtypes."""
    if not file.exists():
        return []
    document = json.loads(file.read_text())
    earlier = {} if document["commit"] == commit else {"commit": document["commit"]}
    return [earlier | row for row in document["rows"] if row["dtype"] not in dtypes]


def main() -> None:
    """Write the file and print our rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {}
    for dtype, ours_file, theirs_file in zip(*[iter(args.files)] * 3, strict=True):
        ours, theirs = (json.loads(Path(file).read_text()) for file in (ours_file, theirs_file))
        if ours["gpu"] != theirs["versions"]["gpu"]:
            raise SystemExit(f"{theirs_file}: got {theirs['versions']['gpu']}, ours {ours['gpu']}")
        document = {key: ours[key] for key in ("gpu", "versions", "commit")}
        document["versions"]["vllm"] = theirs["versions"]["vllm"]
        rows += joined(dtype, ours, theirs)
    rows = kept(args.out, args.files[::3], document["commit"]) + rows
    args.out.write_text(
        json.dumps(document)[:-1]
        + ', "rows": [\n'
        + ",\n".join(json.dumps(row) for row in rows)
        + "\n]}\n"
    )
    for row in rows:
        if "ratio" in row:
            print(row["dtype"], row["section"], row["case"], row["us"], row["ratio"])


if __name__ == "__main__":
    main()
