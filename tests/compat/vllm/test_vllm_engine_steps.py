"""How `vllm_engine.py` counts steps, on vLLM's own output processor and an engine core of ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm_engine import Served


class Engine:
    """An `LLMEngine` whose texts get a token a step once their prompts were computed.

    Args:
        prompts_of: how many texts have their prompts computed in a step.
    """

    def __init__(self, prompts_of: int, replayed: Callable[[], None]) -> None:
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.lengths: dict[str, int] = {}
        self._prompts_of = prompts_of
        self._replayed = replayed
        self._left: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        request = EngineCoreRequest(
            request_id=f"{name}-internal",
            external_req_id=name,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params.clone(),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.output_processor.add_request(request, None)
        self._left[request.request_id] = params.max_tokens
        self.lengths[request.request_id] = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        self._replayed()
        begun = [name for name, length in self.lengths.items() if length]
        new = [name for name, length in self.lengths.items() if not length]
        outputs = []
        for name in [*begun, *new[: self._prompts_of]]:
            if name not in self._left:
                continue
            self.lengths[name] += 1
            self._left[name] -= 1
            reason = None if self._left[name] else FinishReason.LENGTH
            outputs.append(EngineCoreOutput(name, [7], finish_reason=reason))
            if reason:
                del self._left[name]
        return self.output_processor.process_outputs(outputs).request_outputs


def served(prompts_of: int) -> Any:
    made = Served.__new__(Served)
    made.replays = 0

    def replayed() -> None:
        made.replays += 1

    made.llm = SimpleNamespace(llm_engine=Engine(prompts_of, replayed))
    return made


def test_steps_are_timed_in_which_all_texts_decode() -> None:
    engine = served(prompts_of=2)
    found = engine.step(5, 3, (4, 20), 100, same=False)
    assert found["replays"] == 1
    assert found["seconds"] > 0
    # All have their prompts computed in three steps, and go on to their ends.
    assert set(engine.llm.llm_engine.lengths.values()) == {100}
    assert engine.replays == 102
    assert not engine.llm.llm_engine.output_processor.has_unfinished_requests()
    assert engine.step(5, 3, (4, 20), 100, same=True)["replays"] == 1


def test_a_text_that_ends_too_early_is_told() -> None:
    engine = served(prompts_of=1)
    with pytest.raises(RuntimeError, match=r"ended while another had \d+ of 20"):
        engine.step(110, 3, (4, 20), 100, same=False)
