"""A process that compiles grammars of strangers, with little memory and nothing of the engine.

Run as a file. Each line of standard input is a JSON list: first a tokenizer's description and the
bytes that it may allocate for grammars, then a kind of grammar and its text. To each line belongs a
line of standard output: `{"grammar": …}` or `{"error": …}`; a grammar that no token begins has
`"empty": true`.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def _data_bytes() -> int:
    """Return what of RLIMIT_DATA this process has taken."""
    with open("/proc/self/status") as lines:
        kib = next(line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kib) << 10


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is an answer
    from xgrammar import (
        Grammar,
        GrammarCompiler,
        GrammarMatcher,
        TokenizerInfo,
        allocate_token_bitmask,
    )

    description, most_bytes = json.loads(sys.stdin.readline())
    # Libraries take some already, the more the more cores there are.
    limit = _data_bytes() + most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    info = TokenizerInfo.deserialize_json(description)
    print(json.dumps({"grammar": ""}), file=answers, flush=True)
    for line in sys.stdin:
        kind, text = json.loads(line)
        # Without a cache, which strangers would fill.
        compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        try:
            if kind == "json_schema":
                compiled = compiler.compile_json_schema(text)
            elif kind == "json_object":
                compiled = compiler.compile_json_schema('{"type": "object"}', strict_mode=False)
            elif kind == "regex":
                compiled = compiler.compile_regex(text)
            else:
                compiled = compiler.compile_grammar(Grammar.from_ebnf(text))
            first = allocate_token_bitmask(1, info.vocab_size)
            GrammarMatcher(compiled).fill_next_token_bitmask(first)
            answer = {"grammar": compiled.serialize_json(), "empty": not first.any()}
        except BaseException as error:  # also the panics of libraries in Rust
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
