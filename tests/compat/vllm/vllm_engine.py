"""One engine of vLLM in a process of its own, which does what `run_vllm.py` asks it to.

    python vllm_engine.py FD SPECIFICATION

FD is a connection of `multiprocessing`; SPECIFICATION is JSON: `arguments` of `vllm.LLM`. Answers
are tuples: what it was, and a dict or list.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from vllm import LLM, SamplingParams, __version__
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.sampling_params import RequestOutputKind
from vllm_weights import fill_randomly

# New tokens of a text behind those that are timed. Prompts may take several steps, and no text
# shall end while another is timed.
_MARGIN = 80
SEEDED = "seeded"  # the load format of random weights that do not depend on the plug-in


@register_model_loader(SEEDED)
class SeededLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
    """Random weights by the names of parameters, before a kernel changes their layout."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: there is no file."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill all parameters."""
        for name, parameter in model.named_parameters():
            x = parameter.data
            seed = zlib.crc32(name.encode())
            fill_randomly(name, x, torch.Generator(x.device).manual_seed(seed))


class Served:
    """The engine, and how often it replays graphs.

    Args:
        arguments: of `vllm.LLM`.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.replays = 0
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self.replays += 1
            replay(graph)

        setattr(torch.cuda.CUDAGraph, "replay", counted)  # noqa: B010
        start = time.perf_counter()
        self.llm: Any = LLM(**arguments)
        self.seconds = time.perf_counter() - start

    def ready(self) -> dict[str, Any]:
        """Return what vLLM has chosen."""
        config = self.llm.llm_engine.vllm_config
        compilation = config.compilation_config
        return {
            "vllm": __version__,
            "seconds": round(self.seconds, 1),
            "mode": str(compilation.mode),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "sizes": str(compilation.cudagraph_capture_sizes),
            "backend": str(config.attention_config.backend),
            "v2_runner": config.use_v2_model_runner,
            "async_scheduling": config.scheduler_config.async_scheduling,
        }

    def on_workers(self, method: str) -> list[Any] | None:
        """Return what a method of each worker returns, None where that fails, which is printed."""
        try:
            found: list[Any] = self.llm.collective_rpc(method)
        except Exception:
            traceback.print_exc()
            return None
        return found

    def step(
        self, batch: int, prompt: int, counts: tuple[int, int], vocab: int, *, same: bool
    ) -> dict[str, Any]:
        """Time decode steps of a batch, and return the seconds of all of them and replays of one.

        Args:
            batch: of random prompts.
            prompt: tokens of each.
            counts: timed from when all texts have so many new tokens, until they have so many.
            vocab: from which tokens are drawn.
            same: whether all calls have the same prompts, which vLLM then has in its cache.
        """
        first, last = counts
        at: dict[int, tuple[float, int]] = {}
        for tokens in self._decode(batch, prompt, last, vocab, same=same):
            at.setdefault(tokens, (time.perf_counter(), self.replays))
        (begin, before), (end, after) = at[first], at[last]
        return {"seconds": end - begin, "replays": (after - before) / (last - first)}

    def _decode(
        self, batch: int, prompt: int, count: int, vocab: int, *, same: bool
    ) -> Iterator[int]:
        """Continue random prompts, and yield how many new tokens all have, after each step.

        vLLM returns texts when they end: objects for each token of 128 texts take the host a
        millisecond a step, in which the GPU may wait.

        Raises:
            RuntimeError: when a text has ended before all have `count` new tokens.
        """
        draw = random.Random(batch if same else time.perf_counter_ns())
        params = SamplingParams(
            temperature=0,
            max_tokens=count + _MARGIN,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine = self.llm.llm_engine
        for i in range(batch):
            ids = [draw.randrange(vocab) for _ in range(prompt)]
            engine.add_request(f"{time.perf_counter_ns()}-{i}", {"prompt_token_ids": ids}, params)
        texts = [state.detokenizer for state in engine.output_processor.request_states.values()]
        while engine.has_unfinished_requests():
            ended = engine.step()
            least = min(text.num_output_tokens() for text in texts)
            if ended and least < count:
                raise RuntimeError(f"got a text that ended while another had {least} of {count}")
            yield least

    def texts(
        self, prompts: list[list[int]], count: int, groups: int, forced: list[list[int]] | None
    ) -> list[dict[str, Any]]:
        """Continue prompts greedily, `groups` at a time, and return tokens and log probabilities.

        Args:
            prompts: tokens of each.
            count: of new tokens.
            groups: how many prompts are in the engine at a time.
            forced: what vLLM goes on with instead of its own choice, though it says that too.

        Returns:
            Of each prompt `tokens`, their `logprobs`, and `best`: whether each is the likeliest.
        """
        found = []
        for first in range(0, len(prompts), groups):
            part = prompts[first : first + groups]
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=count,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=1,
                    trace_decode_token_ids=None if forced is None else forced[first + i],
                )
                for i in range(len(part))
            ]
            given = [{"prompt_token_ids": prompt} for prompt in part]
            for output in self.llm.generate(given, params, use_tqdm=False):
                (text,) = output.outputs
                tokens = list(text.token_ids)
                said = [at[token] for at, token in zip(text.logprobs, tokens, strict=True)]
                found.append(
                    {
                        "tokens": tokens,
                        "logprobs": [x.logprob for x in said],
                        "best": [x.rank == 1 for x in said],
                    }
                )
        return found

    def kernels(self, batch: int, prompt: int, vocab: int) -> list[dict[str, Any]]:
        """Return GPU kernels of a decode step, and microseconds in all of their launches.

        A kernel that is launched before its predecessor has ended counts what it waits, too.
        """
        first, last = 8, 24
        profiled = profile(activities=[ProfilerActivity.CUDA])
        before = after = 0
        for tokens in self._decode(batch, prompt, last, vocab, same=True):
            if tokens >= first and not before:
                torch.cuda.synchronize()
                before = self.replays
                profiled.start()
            if tokens >= last and not after:
                torch.cuda.synchronize()
                after = self.replays
                profiled.stop()
        found: dict[str, list[float]] = {}
        for event in profiled.events():
            if str(event.device_type).endswith("CUDA"):
                entry = found.setdefault(event.name, [0.0, 0.0])
                entry[0] += 1 / (after - before)
                entry[1] += event.device_time / (after - before)
        longest = sorted(found.items(), key=lambda item: -item[1][1])[:16]
        return [
            {"name": name[:100], "launches": round(n, 1), "us": round(us, 1)}
            for name, (n, us) in longest
        ]


def main() -> None:
    """Answer until the other end closes the connection."""
    with Connection(int(sys.argv[1])) as connection:
        served = Served(json.loads(sys.argv[2])["arguments"])
        connection.send(("ready", served.ready()))
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                break
            connection.send((name, getattr(served, name)(**arguments)))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end takes seconds, and its memory goes with the process


if __name__ == "__main__":
    main()
