"""Joins times of our engine with those of vLLM's, taken on one card in one call: a results file.

    python tests/side_by_side.py --out F [--kv fp8] [--also DOCUMENT ... --] \\
        [DTYPE OURS THEIRS ...]

OURS is a document of `bench engine --lm-head bf16`; THEIRS says `rows` of a batch, tokens of its
prompts and milliseconds a step, `first` of milliseconds to the first tokens of a batch, where they
were timed, `versions` and `phases` in seconds, and as `kv` the dtype of its KV cache, by default
bf16. Both output projections have 16 bits, and with `--kv` both caches have 8 by static scales, so
that the same work is compared. Rows of other dtypes that F has stay; those of another commit name
it. `--also` adds the rows of our documents of the same commit as they are, in front.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.bench.shapes import KV_SUFFIXES, over_16_bits

_SECTIONS = {"engine": "step", "first_token": "first_token"}
_CASE = re.compile(r".* b(\d+) prompt(\d+)\b")
_16_BITS = "bf16"


def joined(
    dtype: str, ours: dict[str, Any], theirs: dict[str, Any], kv: str = _16_BITS
) -> list[dict[str, Any]]:
    """Return rows of both in turn; ours say which peer they are compared with, and the ratio.

    Args:
        dtype: of the weights.
        ours: our document, of which rows over other KV caches are left out.
        theirs: vLLM's.
        kv: dtype of both KV caches, as `bench engine --kv-cache-dtype` calls it.
    """
    if theirs.get("kv", _16_BITS) != kv:
        raise ValueError(f"kv: got {theirs.get('kv', _16_BITS)} of vLLM's cache, expected {kv}")
    name = f"vllm_{theirs['versions']['vllm']}"
    times = {
        ("engine", row["batch"], row.get("prompt")): row["ms_step"] * 1e3 for row in theirs["rows"]
    }
    times |= {
        ("first_token", row["batch"], row.get("prompt")): row["ms"] * 1e3
        for row in theirs.get("first", [])
    }
    of_kv = {"dtype": dtype, "head": "bf16", "kv": kv}
    mine_over = [row for row in ours["rows"] if _is_over(row["impl"], kv)]
    rows = []
    for row in mine_over:
        if row["section"] not in _SECTIONS:
            continue
        match = _CASE.match(row["case"])
        assert match is not None, row["case"]
        batch, prompt = map(int, match.groups())
        common = {"case": row["case"], "section": _SECTIONS[row["section"]], **of_kv}
        where = (row["section"], batch)
        # Rows of vLLM's that do not say how long prompts were are of our case.
        their = times.get((*where, prompt), times.get((*where, None)))
        mine = {**common, "impl": row["impl"], "us": row["us"]}
        if their is not None:
            rows.append({**common, "impl": name, "us": round(their, 1)})
            mine |= {"peer": name, "ratio": round(row["us"] / their, 3)}
        rows.append(mine)
    (startup,) = (row for row in mine_over if row["section"] == "startup")
    after_loading = startup["engine_s"] + startup["capture_s"]
    case = {"case": startup["case"], "section": "startup", **of_kv}
    phases = theirs["phases"]
    their_s = phases["LLM_init_s"] - phases["load_model_s"] - phases["init_device_s"]
    rows.append({**case, "impl": name, "us": round(their_s * 1e6)})
    rows.append({**case, "impl": startup["impl"], "us": round(after_loading * 1e6)})
    return rows


def _is_over(impl: str, kv: str) -> bool:
    """Return whether a name of ours is over a KV cache of this dtype, 8 bits by static scales."""
    twin = over_16_bits(impl)
    return impl == twin if kv == _16_BITS else impl != twin == impl.replace(KV_SUFFIXES[kv], "", 1)


def kept(file: Path, dtypes: Sequence[str], commit: str, kv: str) -> list[dict[str, Any]]:
    """Return the rows of a results file that compare engines with other dtypes."""
    if not file.exists():
        return []
    document = json.loads(file.read_text())
    earlier = {} if document["commit"] == commit else {"commit": document["commit"]}
    return [
        earlier | row
        for row in document["rows"]
        if "dtype" in row and (row["dtype"] not in dtypes or row.get("kv", _16_BITS) != kv)
    ]


def alike(one: dict[str, Any], other: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the other of two documents, if they are of one card and commit."""
    for key in ("gpu", "commit"):
        if one and one[key] != other[key]:
            raise SystemExit(f"{file}: got {key} {other[key]}, expected {one[key]}")
    return other


def main() -> None:
    """Write the file and print our rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kv", choices=KV_SUFFIXES, default=_16_BITS, help="dtype of KV caches")
    parser.add_argument("--also", nargs="+", default=[], metavar="DOCUMENT", help="of ours")
    parser.add_argument("files", nargs="*", metavar="DTYPE OURS THEIRS")
    args = parser.parse_args()
    document: dict[str, Any] = {}
    also: list[dict[str, Any]] = []
    for file in args.also:
        document = alike(document, json.loads(Path(file).read_text()), file)
        also += document["rows"]
    rows: list[dict[str, Any]] = []
    vllm = {}
    for dtype, ours_file, theirs_file in zip(*[iter(args.files)] * 3, strict=True):
        ours, theirs = (json.loads(Path(file).read_text()) for file in (ours_file, theirs_file))
        if ours["gpu"] != theirs["versions"]["gpu"]:
            raise SystemExit(f"{theirs_file}: got {theirs['versions']['gpu']}, ours {ours['gpu']}")
        document = alike(document, ours, ours_file)
        vllm = {"vllm": theirs["versions"]["vllm"]}
        rows += joined(dtype, ours, theirs, args.kv)
    if not document:
        parser.error("expected documents")
    document = {key: document[key] for key in ("gpu", "versions", "commit")}
    document["versions"] = document["versions"] | vllm
    rows = [*also, *kept(args.out, args.files[::3], document["commit"], args.kv), *rows]
    args.out.write_text(
        json.dumps(document)[:-1]
        + ', "rows": [\n'
        + ",\n".join(json.dumps(row) for row in rows)
        + "\n]}\n"
    )
    for row in rows:
        if "ratio" in row:
            print(row["section"], row["case"], row["impl"], row["us"], row["ratio"], row["peer"])


if __name__ == "__main__":
    main()
