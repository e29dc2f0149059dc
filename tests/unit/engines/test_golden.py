"""The decoder computes what `transformers` and `peft` compute."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.reference.checkpoint import load_tensors
from engines.reference.decoder import Decoder, Segment
from engines.reference.golden import make_golden
from engines.reference.kv_cache import BlockShape
from engines.reference.lora import LoraAdapter
from engines.reference.model_config import load_model_config
from engines.reference.paged_kv import BLOCK_TOKENS, BlockPool, blocks_for
from engines.reference.peft_format import load_adapter
from engines.reference.weights import arrange_weights

GOLDEN = make_golden.GOLDEN
TOLERANCE = 1e-3  # logits are around 10; float32 sums in another order differ by about 1e-5


def open_decoder(folder: Path) -> Decoder:
    """A decoder with room for one sequence."""
    config = load_model_config(folder)
    shape = BlockShape(config.layers, config.kv_heads, BLOCK_TOKENS, config.head_dim)
    pool = BlockPool(shape, blocks_for(config.context_tokens))
    return Decoder(config, arrange_weights(config, load_tensors(folder)), pool, config.context_tokens)


def compute(decoder: Decoder, token_ids: list[int], adapter: LoraAdapter | None = None) -> NDArray[np.float32]:
    """Logits of every token, the prompt in one piece."""
    table = decoder.pool.take(blocks_for(len(token_ids)))
    assert table is not None
    return decoder.logits(decoder.forward([Segment(token_ids, 0, table, adapter)]))


def expected(folder: Path) -> tuple[list[int], NDArray[np.float32]]:
    """Token ids and logits as they were written down."""
    with np.load(folder / "expected.npz") as stored:
        return stored["token_ids"].tolist(), stored["logits"]


@pytest.mark.parametrize("case", sorted(make_golden.CASES))
def test_logits_equal_those_of_transformers(case: str) -> None:
    """GQA, tied head, biases, shards, bfloat16, float16, llama3 rotary scaling and Qwen2 give the same logits."""
    token_ids, logits = expected(GOLDEN / case)
    assert np.abs(logits).max() > 1, "the case must not be trivial"
    np.testing.assert_allclose(compute(open_decoder(GOLDEN / case), token_ids), logits, atol=TOLERANCE)


def test_adapted_logits_equal_those_of_peft() -> None:
    """A LoRA adapter over all seven projections gives the logits of `peft`, and not those of the base."""
    base = GOLDEN / make_golden.LORA_BASE
    adapter = load_adapter(GOLDEN / make_golden.LORA_CASE, load_model_config(base), rank_max=64)
    token_ids, logits = expected(GOLDEN / make_golden.LORA_CASE)
    adapted = compute(open_decoder(base), token_ids, adapter)
    np.testing.assert_allclose(adapted, logits, atol=TOLERANCE)
    assert np.abs(adapted - compute(open_decoder(base), token_ids)).max() > 1


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers itself
@pytest.mark.parametrize("case", [*sorted(make_golden.CASES), make_golden.LORA_CASE])
def test_golden_logits_can_be_derived_again(case: str) -> None:
    """What is written down is what the installed torch and transformers compute."""
    for module in ("torch", "transformers", "peft"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    model = make_golden.load_adapted() if case == make_golden.LORA_CASE else make_golden.load_base(case)
    np.testing.assert_allclose(make_golden.logits_of(model), expected(GOLDEN / case)[1], atol=TOLERANCE)
