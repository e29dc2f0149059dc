"""Run inside vLLM's environment by `test_vllm_connector.py`: generates for prompts, with or without our kvstore.

Reads one JSON object from standard input, {"model", "address", "rounds": [[{"tokens", "salt"}, …], …]}; writes
`RESULT` and a JSON list of rounds of [generated tokens, cached tokens]. A new engine is made for each round, so what
one finds of the other came through the kvstore.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING"
)

import vllm
from vllm.config import KVTransferConfig

BLOCK_TOKENS = 32  # what vLLM's CPU attention takes


def main() -> None:
    """Generate and report."""
    asked = json.load(sys.stdin)
    rounds = []
    for requests in asked["rounds"]:
        engine = open_engine(asked["model"], asked["address"])
        rounds.append([generate(engine, request) for request in requests])
        engine.llm_engine.engine_core.shutdown()  # stores what waits
    sys.stdout.write("RESULT" + json.dumps(rounds) + "\n")


def open_engine(model: str, address: str) -> Any:
    """An engine on the CPU."""
    transfer = None
    if address:
        transfer = KVTransferConfig(
            kv_connector="RoundhouseConnector",
            kv_role="kv_both",
            kv_connector_module_path="engines.vllm.kv_connector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"kvstore_address": address, "model_digest": "sha256:" + "ab" * 32},
        )
    return vllm.LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=512,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
    )


def generate(engine: Any, request: dict[str, Any]) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt were not computed."""
    params = vllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": request["tokens"], "cache_salt": request["salt"]}
    if not request["salt"]:
        del prompt["cache_salt"]
    (output,) = engine.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


if __name__ == "__main__":
    main()
