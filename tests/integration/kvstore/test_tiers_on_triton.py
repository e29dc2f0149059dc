"""Invariant 11 on a real Triton through every tier: text with blocks of another node, of a disk, of a process that is
gone, or of a sharing group equals the text without any, token for token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.packaging import EngineSpec
from roundhouse.block_keys import tenant_salt
from roundhouse.wire.v1 import kv_pb2
from tests.builders.checkpoints import random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import Answer, EngineServer
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually

ONE, TWO, THREE, GROUP = (tenant_salt("cluster", name).hex() for name in ("one", "two", "three", "group"))
PROMPT = [5 + (11 * place) % 250 for place in range(200)]  # 12 whole blocks and 8 tokens
CACHED = 192
ANSWER_TOKENS = 20
DIGEST = "sha256:" + "ab" * 32


class Nodes:
    """The same weights on two nodes of one cluster, and once without any kvstore."""

    def __init__(self, server: EngineServer, near: KvStoreProcess, far: KvStoreProcess, weights: Path) -> None:
        self.server, self.near, self.far, self.weights = server, near, far, weights

    def load(self, name: str, kvstore: KvStoreProcess | None) -> None:
        """Load the weights as `name`."""
        address = kvstore.address if kvstore is not None else ""
        spec = EngineSpec("reference", name, str(self.weights), DIGEST, kvstore_address=address)
        self.server.load(spec)

    def ask(self, model: str, salt: str = ONE, tokens: list[int] = PROMPT, **details: Any) -> Answer:
        """A greedy call of one tenant."""
        details = {"salt": salt, "prompt_token_ids": tokens, **details}
        params: dict[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "logprobs": 0}
        answer = self.server.ask(model, "", details=details, **params)
        assert answer.error is None, answer.error
        return answer

    def ask_until(self, expected: int, model: str, plain: Answer, salt: str = ONE, **details: Any) -> None:
        """Call until so many tokens are cached; every answer on the way has the same tokens as the plain one."""

        def found() -> bool:
            answer = self.ask(model, salt, **details)
            assert tokens_of(answer) == tokens_of(plain)
            assert cached_tokens(answer) <= expected
            return cached_tokens(answer) == expected

        eventually(found, within_s=30)


def tokens_of(answer: Answer) -> list[int]:
    """The generated tokens."""
    return [int(entry["id"]) for response in answer.responses for entry in json.loads(response["logprobs"])]


def cached_tokens(answer: Answer) -> int:
    """What the engine says it did not have to compute."""
    return int(json.loads(answer.responses[0]["roundhouse"])["cached_tokens"])


@pytest.fixture(scope="module")
def nodes(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two kvstores with disks, and the models `near`, `far` and `plain`."""
    folders = [tmp_path_factory.mktemp(name) for name in ("near", "far")]
    near, far = (KvStoreProcess(folder, data_dir=folder / "data", node_id=folder.name) for folder in folders)
    for process in (near, far):
        process.start()
    server = EngineServer(triton.grpc_address, triton.log)
    nodes = Nodes(server, near, far, random_checkpoint(tmp_path_factory.mktemp("weights") / "alpha", seed=5))
    for name, kvstore in (("near", near), ("far", far), ("plain", None)):
        nodes.load(name, kvstore)
    yield nodes
    server.client.close()
    near.close()
    far.close()


def prompts(first: int) -> list[list[int]]:
    """Ten prompts: a lookup that is late on a loaded machine is a miss, and then the blocks are computed here."""
    return [[number, *PROMPT[1:]] for number in range(first, first + 10)]


def test_blocks_of_another_node_change_no_token(nodes: Nodes) -> None:
    """`far` computes and stores 12 blocks a prompt; `near` is told where they are and computes 8 of 200 tokens."""
    cached = []
    for tokens in prompts(10):
        plain = nodes.ask("plain", tokens=tokens)
        nodes.ask_until(CACHED, "far", plain, tokens=tokens)
        answer = nodes.ask("near", tokens=tokens, kv_peers=[nodes.far.address])
        assert tokens_of(answer) == tokens_of(plain)
        cached.append(cached_tokens(answer))
    assert CACHED in cached, cached
    assert nodes.near.statistics().peers.fetched >= 12


def test_blocks_of_a_disk_change_no_token(nodes: Nodes) -> None:
    """Used once, the blocks are written; the process is killed, and its successor gives them back from the disk."""
    plain = [nodes.ask("plain", TWO, tokens) for tokens in prompts(100)]
    for tokens, answer in zip(prompts(100), plain, strict=True):
        nodes.ask_until(CACHED, "near", answer, TWO, tokens=tokens)
    on_disk = kv_pb2.GetStatisticsRequest(salt=bytes.fromhex(TWO))
    eventually(lambda: nodes.near.stub.GetStatistics(on_disk, timeout=30).salt_disk_blocks >= 120, within_s=30)
    nodes.near.kill()
    nodes.near.start()
    strangers = iter(range(1_000))

    def engine_has_found_it() -> bool:
        nodes.ask("near", tenant_salt("cluster", f"stranger {next(strangers)}").hex())
        return nodes.near.statistics().blocks > 0

    eventually(engine_has_found_it, within_s=30)
    again = [nodes.ask("near", TWO, tokens) for tokens in prompts(100)]
    assert list(map(tokens_of, again)) == list(map(tokens_of, plain))
    assert CACHED in map(cached_tokens, again)
    assert nodes.near.statistics().disk.promoted >= 12


def test_blocks_of_an_engine_that_is_gone_change_no_token(nodes: Nodes) -> None:
    """The model is unloaded and loaded again: another process with another pool finds what the first one stored."""
    plain = nodes.ask("plain", THREE)
    nodes.ask_until(CACHED, "far", plain, THREE)
    nodes.server.unload("far")
    nodes.load("far", nodes.far)
    nodes.ask_until(CACHED, "far", plain, THREE)


def test_a_shared_beginning_is_found_by_the_group_and_by_nobody_else(nodes: Nodes) -> None:
    """The first 100 tokens are the group's: 6 blocks, 96 tokens. A second member finds these and not the first one's
    rest; a tenant outside finds nothing, and neither does the group's salt as a tenant's own. All say the same."""
    first, second, outside = (tenant_salt("cluster", f"member {number}").hex() for number in range(3))
    shared = {"salt": GROUP, "tokens": 100}
    plain = nodes.ask("plain")
    assert cached_tokens(nodes.ask("far", first, shared=shared)) == 0
    nodes.ask_until(CACHED, "far", plain, first, shared=shared)
    joined = nodes.ask("far", second, shared=shared)
    assert (cached_tokens(joined), tokens_of(joined)) == (96, tokens_of(plain))
    for salt in (outside, GROUP):
        alone = nodes.ask("far", salt)
        assert (cached_tokens(alone) in (0, 96), tokens_of(alone)) == (True, tokens_of(plain))
    assert cached_tokens(nodes.ask("far", tenant_salt("cluster", "fourth").hex())) == 0
