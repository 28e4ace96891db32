"""Joins results files of several parts of run.sh into one; all must be of one GPU.

    python merge.py OUT PART.json ...

OUT has the head of the first part, and the rows of all. A row takes the place of an earlier one
that says the same, so that OUT can be the first part, too, where one was run again; and it has its
`commit` where that is not the head's. It needs neither a GPU nor a package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SAID = ("section", "case", "impl", "parts", "differs", "at_a_time")  # by which a row is known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    args = parser.parse_args()
    documents = [json.loads(part.read_text()) for part in args.parts]
    head = {key: value for key, value in documents[0].items() if key != "rows"}
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for document in documents:
        assert document["gpu"] == head["gpu"], (document["gpu"], head["gpu"])
        for name in ("torch", "cuda", "driver", "vllm"):
            versions = [of["versions"].get(name) for of in (document, head)]
            assert versions[0] == versions[1], (name, *versions)
        for row in document["rows"]:
            if document["commit"] != head["commit"]:
                row.setdefault("commit", document["commit"])
            said = tuple(str(row.get(name)) for name in SAID)
            rows.pop(said, None)
            rows[said] = row
    lines = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    texts = ",\n".join("  " + json.dumps(row) for row in rows.values())
    args.out.write_text("{\n" + lines + '"rows": [\n' + texts + "\n]\n}\n")


if __name__ == "__main__":
    main()
