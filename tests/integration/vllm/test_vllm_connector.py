"""vLLM on the CPU over a real kvstore: the same tokens, less work, and nobody else's blocks. `make test-vllm` runs it.

vLLM needs an environment of its own, `.venv-vllm`; without it these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.kvstore.kvstore_process import KvStoreProcess
from tests.integration.vllm.running import LONGER, MARKS, ONE, PROMPT, TWO, Answers, run_inside

pytestmark = MARKS


def generated(model: Path, address: str, rounds: list[list[dict[str, Any]]]) -> Answers:
    """Tokens and cached tokens of each request; every round has an engine of its own."""
    return run_inside("generate", {"model": str(model), "address": address, "rounds": rounds})


def ask(tokens: list[int], salt: str = ONE) -> dict[str, Any]:
    """One request."""
    return {"tokens": tokens, "salt": salt}


@pytest.fixture(scope="module")
def plain(model: Path) -> Answers:
    """What vLLM says by itself."""
    return generated(model, "", [[ask(PROMPT, ""), ask(LONGER, "")]])


def test_another_engine_finds_the_blocks_and_says_the_same(
    model: Path, plain: Answers, kvstore: KvStoreProcess
) -> None:
    """Invariant 11. The first engine computes all and stores 4 blocks; the second finds 4 of 150 tokens' blocks, 128
    tokens, and 2 of the other prompt's, 64. Every token equals that of vLLM without a store."""
    first, second = generated(model, kvstore.address, [[ask(PROMPT)], [ask(PROMPT), ask(LONGER)]])
    assert [first[0][0], *(tokens for tokens, _ in second)] == [plain[0][0][0], *(tokens for tokens, _ in plain[0])]
    assert [cached for _, cached in [*first, *second]] == [0, 128, 64]
    assert kvstore.statistics().blocks >= 4


def test_another_tenant_and_nobody_share_nothing(model: Path, plain: Answers, kvstore: KvStoreProcess) -> None:
    """B25: after tenant one's call, tenant two finds 0, a call without a salt finds 0 and stores nothing."""
    rounds = [[ask(PROMPT)], [ask(PROMPT, TWO), ask(PROMPT, "")], [ask(PROMPT, "")]]
    answers = generated(model, kvstore.address, rounds)
    assert [cached for each in answers for _, cached in each] == [0, 0, 0, 0]
    assert {tuple(tokens) for each in answers for tokens, _ in each} == {tuple(plain[0][0][0])}


def test_wrong_blocks_are_computed_again(model: Path, plain: Answers, kvstore: KvStoreProcess) -> None:
    """Every byte of the arena is inverted between two engines: the second notices, and says the same."""
    generated(model, kvstore.address, [[ask(PROMPT)]])
    kvstore.invert_arena()
    (again,) = generated(model, kvstore.address, [[ask(PROMPT)]])
    assert again[0][0] == plain[0][0][0]


def test_without_the_store_vllm_goes_on(model: Path, plain: Answers, kvstore: KvStoreProcess) -> None:
    """The store is dead: all is computed."""
    kvstore.kill()
    (alone,) = generated(model, kvstore.address, [[ask(PROMPT)]])
    assert alone == [(plain[0][0][0], 0)]
