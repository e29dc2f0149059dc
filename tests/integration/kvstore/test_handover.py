"""A prompt's blocks go to the node that decodes while they are computed: two kvstores, two engines, and the gateway's
part of it. Whatever becomes of a node or the wire between, the text is that of one place, and nothing stays held."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from engines.reference.intake import CallInputs, accept_call, await_prefix
from engines.reference.kvstore_client import KvStoreClient
from engines.reference.loaded_model import LoadedModel
from engines.reference.paged_kv import BLOCK_TOKENS
from engines.reference.sequence import TokenGenerated
from roundhouse.block_keys import prefix_block_keys, tenant_salt
from roundhouse.wire.v1 import kv_pb2
from services.gateway.adapters.kv_holds import KvStoreHolds
from services.gateway.ports import BlockTransfer, HeldBlocks
from tests.builders.checkpoints import random_checkpoint
from tests.integration.kvstore.faulty_wire import Fault, FaultyWire
from tests.integration.kvstore.kvstore_process import KvStoreProcess
from tests.unit.engines.engine_driver import Outcome, open_model, run_requests

DIGEST = "ab" * 32
PROMPT = [5 + (7 * place + place // 250) % 250 for place in range(700)]  # 43 whole blocks; 6 chunks of 128
BLOCKS = len(PROMPT) // BLOCK_TOKENS
TOKENS = 8
SAMPLING = json.dumps({"temperature": 1.0, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True})
FAULTS: tuple[Fault, ...] = ("none", "flip", "cut", "withhold")


class Split:
    """A node for prompts, a node that decodes, a wire from the first to the second, and a gateway's transfers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        weights = random_checkpoint(folder / "weights", 5, context_tokens=1024)
        self.chance = random.Random(1)
        self.plain = open_model(weights)
        self.nodes = {name: self._node(folder / name, stack) for name in ("prefill", "decode")}
        self.engines = {name: self._engine(weights, node, stack) for name, node in self.nodes.items()}
        self.wire = FaultyWire(self.nodes["prefill"].grpc_port, self.chance)
        stack.enter_context(closing(self.wire))
        self.holds: KvStoreHolds | None = None
        self.count = 0
        self.salt = b""

    def _node(self, folder: Path, stack: ExitStack) -> KvStoreProcess:
        folder.mkdir()
        node = KvStoreProcess(folder, node_id=folder.name)
        stack.enter_context(closing(node))
        node.start()
        return node

    def _engine(self, weights: Path, node: KvStoreProcess, stack: ExitStack) -> LoadedModel:
        engine = open_model(weights, kvstore_address=node.address, model_digest=DIGEST)
        stack.callback(engine.store.close)
        assert isinstance(engine.store, KvStoreClient)
        assert engine.store.wait_until_mapped(30)
        return engine

    def prompt(self) -> list[int]:
        """One of another tenant than those before."""
        self.count += 1
        self.salt = tenant_salt("cluster", str(self.count))
        return [self.count, *PROMPT[1:]]

    def held(self, prompt: list[int]) -> HeldBlocks:
        """Its blocks, under the name of its attempt."""
        keys = prefix_block_keys(self.salt, bytes.fromhex(DIGEST), b"", BLOCK_TOKENS, prompt)
        return HeldBlocks(self.salt, tuple(keys), f"r{self.count}/1")

    def begin(self, prompt: list[int]) -> BlockTransfer:
        """What the gateway does at a grant for two nodes."""
        assert self.holds is not None
        return self.holds.begin(self.wire.address, self.nodes["decode"].address, self.held(prompt))

    def inputs(self, prompt: list[int], phase: str, **details: object) -> CallInputs:
        """A call as the gateway makes it."""
        details = {"salt": self.salt.hex(), "phase": phase, "prompt_token_ids": prompt, **details}
        return CallInputs("", SAMPLING, json.dumps(details))

    def prefill(self, prompt: list[int]) -> Iterator[int | None]:
        """Runs the prompt, a chunk in each step; yields None after each but the last, and then the first token."""
        engine = self.engines["prefill"]
        engine.engine.submit(accept_call(engine, self.inputs(prompt, "prefill")).request, 0.0)
        while engine.engine.has_work:
            events = engine.engine.step()
            assert engine.store.flush(30)
            yield next((event.token_id for event in events if isinstance(event, TokenGenerated)), None)

    def decode(self, prompt: list[int], first: int) -> Outcome:
        """The rest, on the other node."""
        engine = self.engines["decode"]
        peers = {"kv_peers": [self.wire.address], "kv_hold": f"r{self.count}/1"}
        call = accept_call(engine, self.inputs(prompt, "decode", resumed_token_ids=[first], **peers))
        if call.awaits_more:
            call = await_prefix(engine, call)
        return run_requests(engine, [call.request])[0]

    def whole(self, prompt: list[int]) -> list[int]:
        """What one engine without a store says."""
        call = accept_call(self.plain, self.inputs(prompt, "full"))
        return run_requests(self.plain, [call.request])[0].token_ids

    def blocks_at(self, name: str) -> int:
        """Blocks of the tenant in a node's memory."""
        request = kv_pb2.GetStatisticsRequest(salt=self.salt)
        return int(self.nodes[name].stub.GetStatistics(request, timeout=30).salt_blocks)

    async def nothing_is_held(self) -> None:
        """No hold and no lease is left on either node, without waiting for one to run out."""
        for node in self.nodes.values():
            await until(lambda node=node: (node.statistics().holds, node.statistics().leases) == (0, 0))  # type: ignore[misc]
            counts = node.statistics()
            assert counts.leases_expired == 0
            assert counts.slots_free + counts.slots_held == counts.slots_total


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """Everything runs."""
    with ExitStack() as stack:
        yield Split(tmp_path_factory.mktemp("split"), stack)


@pytest.fixture
async def split(nodes: Split) -> AsyncIterator[Split]:
    """A gateway's connections to them."""
    nodes.wire.fault = "none"
    nodes.holds = KvStoreHolds()
    yield nodes
    await nodes.holds.close()


async def until(true: Callable[[], bool]) -> None:
    """Wait for other processes; the loop goes on."""
    for _ in range(1_500):
        if await asyncio.to_thread(true):
            return
        await asyncio.sleep(0.02)  # between two looks at another process
    raise AssertionError("it did not come to that within 30 s")


async def test_decode_has_the_blocks_when_the_prompt_ends(split: Split) -> None:
    """Blocks come to the decode node after the second of 6 chunks, long before the last; all 43 are there before decode
    is asked, which computes only the tokens behind them; the text is that of one place, and the hold has ended."""
    prompt = split.prompt()
    transfer = split.begin(prompt)
    steps = split.prefill(prompt)
    assert [next(steps), next(steps)] == [None, None]
    await until(lambda: split.blocks_at("decode") >= 8)
    assert split.blocks_at("prefill") == 16, "four chunks are still to be computed"
    first = [token for token in steps if token is not None]
    transfer.prefilled()
    await until(lambda: split.blocks_at("decode") == BLOCKS)
    rest = await asyncio.to_thread(split.decode, prompt, first[0])
    transfer.end()
    assert rest.cached_tokens == BLOCKS * BLOCK_TOKENS
    assert first + rest.token_ids == split.whole(prompt)
    await split.nothing_is_held()


async def test_a_prefill_that_dies_midway_leaves_nothing_waiting(split: Split) -> None:
    """Its engine is gone after 2 of 6 chunks and the gateway gives up: the exchange ends at once on both nodes, nothing
    stays held or reserved, and the same prompt runs again from what was computed."""
    prompt = split.prompt()
    transfer = split.begin(prompt)
    steps = split.prefill(prompt)
    assert [next(steps), next(steps)] == [None, None]
    await until(lambda: split.blocks_at("decode") >= 8)
    split.engines["prefill"].engine.fail_all("killed")
    transfer.end()
    await split.nothing_is_held()
    transfer = split.begin(prompt)
    first = [token for token in split.prefill(prompt) if token is not None]
    transfer.prefilled()
    rest = await asyncio.to_thread(split.decode, prompt, first[0])
    transfer.end()
    assert first + rest.token_ids == split.whole(prompt)
    await split.nothing_is_held()


async def test_a_result_that_nobody_collects_is_let_go(split: Split) -> None:
    """The node that was to decode has no store, and decode is refused: the 43 blocks are held on the prefill node until
    the gateway gives up, and then are as any others."""
    prompt, node = split.prompt(), split.nodes["prefill"]
    assert split.holds is not None
    transfer = split.holds.begin(node.address, "", split.held(prompt))
    assert [token for token in split.prefill(prompt) if token is not None]
    transfer.prefilled()
    await until(lambda: node.statistics().holds == 1)
    assert node.statistics().slots_leased == BLOCKS
    transfer.end()
    await split.nothing_is_held()
    assert split.blocks_at("prefill") == BLOCKS


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_fault_of_the_wire_changes_a_token(split: Split, fault: Fault) -> None:
    """Bytes between the nodes are flipped, cut and withheld while the prompt is computed and after: three prompts,
    token for token those of one place; the books balance."""
    for _ in range(3):
        prompt = split.prompt()
        split.wire.fault = fault
        transfer = split.begin(prompt)
        first = []
        for token in split.prefill(prompt):
            first += [token] if token is not None else []
            await asyncio.sleep(0)  # the transfer's own calls
        transfer.prefilled()
        rest = await asyncio.to_thread(split.decode, prompt, first[0])
        transfer.end()
        assert first + rest.token_ids == split.whole(prompt)
    for node in split.nodes.values():
        counts = node.statistics()
        assert counts.slots_free + counts.slots_held == counts.slots_total


async def test_a_prefill_nodes_store_that_dies_midway_costs_the_blocks_only(split: Split) -> None:
    """Killed after 2 of 6 chunks: decode computes what did not come, with the same text."""
    prompt = split.prompt()
    transfer = split.begin(prompt)
    steps = split.prefill(prompt)
    assert [next(steps), next(steps)] == [None, None]
    await until(lambda: split.blocks_at("decode") >= 8)
    split.nodes["prefill"].kill()
    first = [token for token in steps if token is not None]
    transfer.prefilled()
    rest = await asyncio.to_thread(split.decode, prompt, first[0])
    transfer.end()
    assert first + rest.token_ids == split.whole(prompt)
    split.nodes["prefill"].start()
    await split.nothing_is_held()
