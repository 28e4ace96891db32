"""Joins results files of several parts of run.sh into one; all must be of one GPU and commit.

    python merge.py OUT PART.json ...

OUT has the head of the first part and the rows of all, in the order of the parts. It needs neither
a GPU nor a package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    args = parser.parse_args()
    documents = [json.loads(part.read_text()) for part in args.parts]
    head = {key: value for key, value in documents[0].items() if key != "rows"}
    for document in documents[1:]:
        for key in ("gpu", "commit"):
            assert document[key] == head[key], (key, document[key], head[key])
    rows = [row for document in documents for row in document["rows"]]
    lines = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    texts = ",\n".join("  " + json.dumps(row) for row in rows)
    args.out.write_text("{\n" + lines + '"rows": [\n' + texts + "\n]\n}\n")


if __name__ == "__main__":
    main()
