"""Fuzz of the whole path: bytes are flipped, cut and withheld in both arenas, in segment files, on the wire between two
nodes, and processes are killed. Whatever happens, an engine generates the tokens that it generates without a cache.

`ROUNDHOUSE_KV_FUZZ_SECONDS` makes the run longer, `ROUNDHOUSE_KV_FUZZ_SEED` repeats one.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from engines.reference.intake import CallInputs, accept_call, await_prefix
from engines.reference.kvstore_client import KvStoreClient
from engines.reference.loaded_model import LoadedModel
from roundhouse.block_keys import tenant_salt
from tests.builders.checkpoints import random_checkpoint
from tests.integration.kvstore.faulty_wire import FaultyWire
from tests.integration.kvstore.kvstore_process import KvStoreProcess
from tests.unit.engines.engine_driver import Outcome, open_model, run_requests

SECONDS = float(os.environ.get("ROUNDHOUSE_KV_FUZZ_SECONDS", "8"))
SEED = int(os.environ.get("ROUNDHOUSE_KV_FUZZ_SEED", "1"))
PROMPTS = 12
SALT = tenant_salt("cluster", "one").hex()
GROUP = tenant_salt("cluster", "group").hex()
DIGEST = "ab" * 32


class World:
    """Two nodes with an engine each, a wire between them, and an engine without a store."""

    def __init__(self, folder: Path, stack: ExitStack, chance: random.Random) -> None:
        weights = random_checkpoint(folder / "weights", seed=5)
        self.chance = chance
        self.did: Counter[str] = Counter()
        self.plain = open_model(weights)
        self.prompts = [
            [number, *(5 + (number * 31 + 11 * place) % 250 for place in range(70 + 7 * number))]
            for number in range(PROMPTS)
        ]
        self.expected = [self._ask(self.plain, prompt).token_ids for prompt in self.prompts]
        self.nodes: list[KvStoreProcess] = []
        self.engines: list[LoadedModel] = []
        for name in ("near", "far"):
            (folder / name).mkdir()
            key = folder / name / "key"
            key.write_text("5a" * 32)
            node = KvStoreProcess(
                folder / name,
                data_dir=folder / name / "data",
                node_id=name,
                arena_bytes=1 << 20,
                disk_key_file=key if name == "far" else "",
            )
            stack.enter_context(closing(node))
            node.start()
            self.nodes.append(node)
            engine = open_model(weights, kvstore_address=node.address, model_digest=DIGEST)
            stack.callback(engine.store.close)
            assert isinstance(engine.store, KvStoreClient)
            assert engine.store.wait_until_mapped(30)
            self.engines.append(engine)
        self.wires = [FaultyWire(node.grpc_port, chance) for node in reversed(self.nodes)]
        for wire in self.wires:
            stack.enter_context(closing(wire))

    def ask(self) -> None:
        """One engine answers one prompt; the other node is named as a peer, by way of its wire."""
        which, number = self.chance.randrange(2), self.chance.randrange(PROMPTS)
        shared = {"salt": GROUP, "tokens": 40} if number % 3 == 0 else None
        peers = [self.wires[which].address] if self.chance.random() < 0.7 else []
        outcome = self._ask(self.engines[which], self.prompts[number], kv_peers=peers, shared=shared)
        assert outcome.token_ids == self.expected[number], f"wrong tokens, seed {SEED}, after {dict(self.did)}"
        self.did["answers"] += 1
        self.did["cached tokens"] += outcome.cached_tokens
        if self.chance.random() < 0.5:
            self.engines[which].store.flush(5)

    def harm_arena(self) -> None:
        """Up to 40 bytes of an arena are flipped."""
        node = self.chance.choice(self.nodes)
        for _ in range(self.chance.randrange(1, 40)):
            node.flip_byte(self.chance.randrange(1 << 20))
        self.did["arena"] += 1

    def harm_disk(self) -> None:
        """A byte of a segment file is flipped, or the file is cut, under a running process."""
        for path in self.chance.choice(self.nodes).segments():
            size = path.stat().st_size
            if self.chance.random() < 0.1:
                os.truncate(path, self.chance.randrange(size + 1))
            elif size:
                with path.open("r+b") as file:
                    at = self.chance.randrange(size)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x10]))
        self.did["disk"] += 1

    def harm_wire(self) -> None:
        """A wire begins or ceases to flip, cut or withhold."""
        self.chance.choice(self.wires).fault = self.chance.choice(("none", "flip", "cut", "withhold"))
        self.did["wire"] += 1

    def kill(self) -> None:
        """A store dies and is started again."""
        node = self.chance.choice(self.nodes)
        node.kill()
        node.start()
        self.did["kill"] += 1

    def _ask(self, model: LoadedModel, prompt: list[int], **details: Any) -> Outcome:
        inputs = CallInputs(
            "",
            json.dumps({"temperature": 0, "max_tokens": 6, "ignore_eos": True}),
            json.dumps({"salt": SALT, "prompt_token_ids": prompt, **details}),
        )
        call = accept_call(model, inputs)
        if call.awaits_more:
            call = await_prefix(model, call)
        return run_requests(model, [call.request])[0]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Everything runs."""
    with ExitStack() as stack:
        yield World(tmp_path, stack, random.Random(SEED))


@pytest.mark.timeout(SECONDS + 120)
def test_no_fault_changes_a_token(world: World) -> None:
    """Invariants 11 and 12: every answer is compared, some of them were found in the cache, and the books balance."""
    actions = [world.ask] * 20 + [world.harm_arena] * 3 + [world.harm_disk] * 2 + [world.harm_wire] * 2
    until_s = time.monotonic() + SECONDS
    while time.monotonic() < until_s or not world.did["cached tokens"]:
        world.chance.choice(actions)()
        if world.chance.random() < 0.01:
            world.kill()
    for node in world.nodes:
        counts = node.statistics()
        assert counts.slots_free + counts.slots_held == counts.slots_total
    print(dict(world.did))  # noqa: T201 - what a long run was worth
