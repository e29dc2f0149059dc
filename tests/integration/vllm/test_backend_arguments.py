"""The package of a vLLM model, given to vLLM as Triton's vLLM backend gives it: the connector is found, and the salt
that gateways put into `sampling_parameters` keeps tenants apart. On vLLM's CPU build; `make test-vllm` runs it.

Not run here: that backend itself, which Triton's wheel does not have, and any GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.packaging import EngineSpec, package
from services.gateway.domain.sampling import Sampling
from tests.integration.kvstore.kvstore_process import KvStoreProcess
from tests.integration.vllm.running import LONGER, MARKS, ONE, PROMPT, TWO, run_inside

pytestmark = MARKS

# What a CPU needs and a GPU does not, and what saves time here.
HERE = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 512, "skip_tokenizer_init": True}
SAMPLING = Sampling(temperature=0, ignore_eos=True)


def call(tokens: list[int], salt: str) -> dict[str, Any]:
    """A request as a gateway makes it; without a salt one of somebody who knows no gateway."""
    extra = {"salt": salt} if salt else None
    parameters = json.loads(SAMPLING.engine_parameters(0, 12, extra)) | {"detokenize": False}
    return {"tokens": tokens, "sampling_parameters": json.dumps(parameters)}


def test_tenants_find_their_own_blocks_and_no_others(model: Path, kvstore: KvStoreProcess) -> None:
    """B25. Tenant one computes 150 tokens; in another engine it finds 128 of them, and 64 of a prompt that begins
    alike. Tenant two and a caller without a salt find nothing, in the same engine too. All say what vLLM alone says."""
    spec = EngineSpec("vllm", "m--1", str(model), model_digest="sha256:" + "ab" * 32, slots=8)
    alone, with_store = (
        json.loads(package(each).files["file:1/model.json"])
        for each in (spec, EngineSpec(**{**_fields(spec), "kvstore_address": kvstore.address}))
    )
    assert "kv_transfer_config" not in alone
    rounds = [
        [call(PROMPT, ONE)],
        [call(PROMPT, ONE), call(LONGER, ONE), call(PROMPT, TWO), call(PROMPT, ""), call(PROMPT, "")],
    ]
    [plain] = run_inside("backend", {"arguments": alone, "here": HERE, "rounds": [[*rounds[0], call(LONGER, ONE)]]})
    first, second = run_inside("backend", {"arguments": with_store, "here": HERE, "rounds": rounds})
    assert [cached for _, cached in [*plain, *first, *second]] == [0, 0, 0, 128, 64, 0, 0, 0]
    assert [tokens for tokens, _ in second] == [plain[0][0], plain[1][0], *[plain[0][0]] * 3]


def _fields(spec: EngineSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__slots__}
