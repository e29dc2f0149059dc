"""The reference engine on a real Triton with a real kvstore: the same text, less work, and nobody else's blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.packaging import EngineSpec
from roundhouse.block_keys import tenant_salt
from tests.builders.checkpoints import random_adapter, random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import Answer, EngineServer
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually

ONE, TWO = tenant_salt("cluster", "one").hex(), tenant_salt("cluster", "two").hex()
PROMPT = [5 + (7 * place) % 250 for place in range(50)]  # 50 tokens: 3 whole blocks and 2 tokens
ANSWER_TOKENS = 24


class Engines:
    """Models of one Triton that share a kvstore."""

    def __init__(self, server: EngineServer, kvstore: KvStoreProcess, weights: dict[str, Path]) -> None:
        self.server = server
        self.kvstore = kvstore
        self.weights = weights

    def load(self, name: str, weights: str, *, cached: bool = True, digest: str = "") -> None:
        """Load `weights` as `name`; the digest is that of the weights unless given."""
        spec = EngineSpec(
            engine="reference",
            triton_model_name=name,
            weights_path=str(self.weights[weights]),
            model_digest=digest or f"sha256:{weights.encode().hex():0>64}",
            kvstore_address=self.kvstore.address if cached else "",
        )
        self.server.load(spec)

    def ask(self, model: str, salt: str = ONE, tokens: list[int] = PROMPT, **details: Any) -> Answer:
        """A greedy call of one tenant, with log probabilities, which name the generated tokens."""
        details = {"salt": salt, "prompt_token_ids": tokens, **details}
        params: dict[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "logprobs": 0}
        answer = self.server.ask(model, "", details=details, **params)
        assert answer.error is None, answer.error
        assert answer.output_tokens == ANSWER_TOKENS
        return answer

    def ask_and_store(self, model: str, salt: str = ONE, tokens: list[int] = PROMPT, **details: Any) -> Answer:
        """A call, and then a wait until its blocks are stored."""
        before = self.kvstore.statistics().blocks
        answer = self.ask(model, salt, tokens, **details)
        # The last token is never computed, so its block is not whole: floor((prompt + answer - 1) / 16) in all.
        whole = (len(tokens) + ANSWER_TOKENS - 1) // 16
        eventually(lambda: self.kvstore.statistics().blocks >= before + whole - cached_tokens(answer) // 16)
        return answer

    def ask_until_cached(self, expected: int, salt: str = ONE, tokens: list[int] = PROMPT, **details: Any) -> Answer:
        """Call `alpha` until it finds as much as is stored: on a loaded machine a lookup may be late, which is a miss.

        Never may a call find more, nor say anything else than the call before."""
        answers: list[Answer] = []

        def found() -> bool:
            answers.append(self.ask("alpha", salt, tokens, **details))
            assert answers[-1].text == answers[0].text
            assert cached_tokens(answers[-1]) <= expected
            return cached_tokens(answers[-1]) == expected

        eventually(found)
        return answers[-1]


def cached_tokens(answer: Answer) -> int:
    """What the engine says it did not have to compute."""
    return int(json.loads(answer.responses[0]["roundhouse"])["cached_tokens"])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small random models and an adapter over the first."""
    folder = tmp_path_factory.mktemp("weights")
    alpha = random_checkpoint(folder / "alpha", seed=1)
    beta = random_checkpoint(folder / "beta", seed=2)
    return {"alpha": alpha, "beta": beta, "blue": random_adapter(folder / "blue", alpha, seed=3)}


@pytest.fixture(scope="module")
def shared_kvstore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvStoreProcess]:
    """The module's kvstore."""
    process = KvStoreProcess(tmp_path_factory.mktemp("kvstore"))
    process.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def engines(triton: TritonServer, shared_kvstore: KvStoreProcess, weights: dict[str, Path]) -> Iterator[Engines]:
    """Triton with alpha twice: `alpha` with the kvstore, `plain` without."""
    server = EngineServer(triton.grpc_address, triton.log)
    engines = Engines(server, shared_kvstore, weights)
    engines.load("alpha", "alpha")
    engines.load("plain", "alpha", cached=False)
    yield engines
    server.client.close()


@pytest.fixture(autouse=True)
def empty_kvstore(shared_kvstore: KvStoreProcess) -> None:
    """Every test begins with an empty store: killed and started again, as after a crash."""
    shared_kvstore.kill()
    shared_kvstore.start()


@pytest.fixture(autouse=True)
def found_again(empty_kvstore: None, engines: Engines) -> None:
    """The engine notices the new store by a first request of somebody else; blocks of that are not asked for again."""
    tokens = [200] * 33

    def stored() -> bool:
        engines.ask("alpha", "warm-up", tokens)
        return engines.kvstore.statistics().blocks == (33 + ANSWER_TOKENS - 1) // 16

    eventually(stored)


def test_text_with_cache_equals_text_without(engines: Engines) -> None:
    """Invariant 11. 50 tokens: the first call computes all, the second takes floor(49/16) * 16 = 48 from the store, and
    the text is that of the engine without a store."""
    plain = engines.ask("plain")
    first = engines.ask_and_store("alpha")
    second = engines.ask_until_cached(48)
    assert [cached_tokens(answer) for answer in (plain, first)] == [0, 0]
    assert first.text == second.text == plain.text


def test_one_token_is_always_computed(engines: Engines) -> None:
    """48 tokens are exactly 3 blocks, but the last token's state is needed: floor(47/16) * 16 = 32 are taken."""
    first = engines.ask_and_store("alpha", tokens=PROMPT[:48])
    assert cached_tokens(first) == 0
    assert engines.ask_until_cached(32, tokens=PROMPT[:48]).text == first.text


def test_the_next_turn_of_a_conversation_finds_the_answer_too(engines: Engines) -> None:
    """Prompt and answer were 50 + 24 tokens, of which 73 were computed: floor(73/16) = 4 blocks, one of them mostly of
    the answer. The next prompt begins with them, and finds 64 tokens."""
    following = [*PROMPT, *generated(engines.ask_and_store("alpha")), 9, 10, 11]
    second = engines.ask_until_cached(64, tokens=following)
    assert second.text == engines.ask("plain", tokens=following).text


def test_another_tenant_shares_nothing(engines: Engines) -> None:
    """B25: after tenant one's call, tenant two's same prompt finds 0; each one's repeat finds its own 48."""
    engines.ask_and_store("alpha", ONE)
    assert cached_tokens(engines.ask_and_store("alpha", TWO)) == 0
    assert engines.ask_until_cached(48, ONE).text == engines.ask_until_cached(48, TWO).text


def test_an_adapters_name_is_not_a_salt(engines: Engines) -> None:
    """B25: adapter `blue` of one tenant, then the base model with salt `blue`, then with the first salt: 0, 0, 0. The
    adapter's repeat finds 48 and the same text."""
    blue = {"path": str(engines.weights["blue"]), "digest": "blue"}
    first = engines.ask_and_store("alpha", ONE, adapter=blue)
    assert cached_tokens(first) == 0
    assert cached_tokens(engines.ask_and_store("alpha", "blue")) == 0
    assert cached_tokens(engines.ask_and_store("alpha", ONE)) == 0
    assert engines.ask_until_cached(48, ONE, adapter=blue).text == first.text


def test_without_a_salt_nothing_is_kept(engines: Engines) -> None:
    """A call that names no tenant shares with nobody, not even with itself."""
    assert cached_tokens(engines.ask("alpha", "")) == cached_tokens(engines.ask("alpha", "")) == 0


def test_new_weights_under_an_old_name_find_nothing(engines: Engines) -> None:
    """B26: alpha answers; m is beta, and then alpha's weights under alpha's digest. The first call of beta finds 0 and
    answers otherwise; the weights that made the blocks find all 48 again, under whatever name."""
    first = engines.ask_and_store("alpha")
    engines.load("m", "beta")
    swapped = engines.ask_and_store("m")
    engines.server.unload("m")
    assert cached_tokens(swapped) == 0
    assert swapped.text != first.text
    engines.load("m", "alpha")
    eventually(lambda: cached_tokens(engines.ask("m")) == 48)
    assert engines.ask("m").text == first.text
    engines.server.unload("m")


def test_a_digest_is_what_names_the_weights(engines: Engines) -> None:
    """B26: the very same folder under another digest finds 0: nothing is taken from a name or a path."""
    engines.ask_and_store("alpha")
    engines.load("m", "alpha", digest="sha256:" + "ab" * 32)
    assert cached_tokens(engines.ask_and_store("m")) == 0
    engines.server.unload("m")


def test_a_kvstore_that_dies_changes_no_text(engines: Engines) -> None:
    """Killed, the call computes all of it; started again, the second call after it finds its blocks."""
    before = engines.ask_and_store("alpha")
    engines.kvstore.kill()
    without = engines.ask("alpha")
    assert (cached_tokens(without), without.text) == (0, before.text)
    engines.kvstore.start()
    assert engines.ask_until_cached(48).text == before.text


def test_blocks_with_a_wrong_byte_change_no_text(engines: Engines) -> None:
    """Every byte of the arena is inverted: the next call finds 0 and gives the same text."""
    before = engines.ask_and_store("alpha")
    engines.kvstore.invert_arena()
    after = engines.ask("alpha")
    assert (cached_tokens(after), after.text) == (0, before.text)
    eventually(lambda: engines.kvstore.statistics().corrupt >= 1)


def generated(answer: Answer) -> list[int]:
    """The generated tokens of an answer, from its log probabilities."""
    return [int(entry["id"]) for response in answer.responses for entry in json.loads(response["logprobs"])]
