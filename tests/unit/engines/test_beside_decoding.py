"""Offloads and lookups beside a decoding stream: it gets a token in every step, whatever the store does meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import engines.reference.step_engine as step_engine
from engines.reference.engine_loop import EngineLoop, is_final
from engines.reference.intake import CallInputs, accept_call, await_prefix
from engines.reference.kv_cache import BlockArray, BlockSpace, CachedPrefix
from engines.reference.kvstore_client import KvStoreClient
from engines.reference.loaded_model import LoadedModel
from engines.reference.pacing import Pace
from engines.reference.sequence import Event, GenerationRequest, TokenGenerated
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from tests.builders.checkpoints import random_checkpoint
from tests.unit.engines.engine_driver import make_request, open_model, run_one

LIMIT_S = 30.0
TOKENS = 200
SALT = "aa"
LONG = np.random.default_rng(0).integers(5, 250, 400).tolist()  # 25 blocks


class WithheldStore(kv_pb2_grpc.KvStoreServicer):
    """A kvstore that lets nobody store or find anything until it is told to."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(1 << 20))
        self.arena = kv_pb2.Arena(path=str(path), bytes=1 << 20, slot_bytes=4096, incarnation="run")
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.reserved = 0

    def DescribeArena(self, request: Any, context: Any) -> kv_pb2.Arena:
        """At once."""
        return self.arena

    def AcquirePrefix(self, request: Any, context: Any) -> kv_pb2.AcquirePrefixReply:
        """Nothing in memory, and something somewhere, which takes its time."""
        if request.wait_ms:
            self.asked.set()
            self.go_on.wait(LIMIT_S)
        return kv_pb2.AcquirePrefixReply(incarnation="run", more=len(request.keys))

    def ReserveBlocks(self, request: Any, context: Any) -> kv_pb2.ReserveBlocksReply:
        """Withheld; and then there is no room."""
        self.reserved += len(request.keys)
        self.asked.set()
        self.go_on.wait(LIMIT_S)
        return kv_pb2.ReserveBlocksReply(incarnation="run")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[WithheldStore, str]]:
    """A store, and where it listens."""
    withheld = WithheldStore(tmp_path / "arena")  # type: ignore[abstract]  # nobody calls the others
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        kv_pb2_grpc.add_KvStoreServicer_to_server(withheld, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield withheld, f"127.0.0.1:{port}"
        withheld.go_on.set()
        server.stop(0).wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return random_checkpoint(tmp_path_factory.mktemp("random") / "m", 3, context_tokens=1024)


def opened(folder: Path, address: str, stack: ExitStack) -> LoadedModel:
    """An engine that has found its store."""
    model = open_model(folder, kvstore_address=address, model_digest="ab" * 32)
    stack.callback(model.store.close)
    assert isinstance(model.store, KvStoreClient)
    assert model.store.wait_until_mapped(LIMIT_S)
    return model


def salted(model: LoadedModel, prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    """A request whose blocks are stored."""
    return make_request(model, prompt, details={"salt": SALT}, max_tokens=max_tokens, ignore_eos=True)


def tokens_of(model: LoadedModel, request: GenerationRequest) -> list[int]:
    """Tokens of one request in one step of the engine."""
    events = model.engine.step()
    return [
        event.token_id
        for event in events
        if isinstance(event, TokenGenerated) and event.request_id == request.request_id
    ]


def test_a_stream_gets_a_token_in_every_step_while_offloads_are_withheld(
    folder: Path, store: tuple[WithheldStore, str]
) -> None:
    """A stream of 200 tokens; after 10 of them a prompt of 400 arrives, whose 25 blocks, and those of the answers, are
    offered. The store takes the first offer and does not answer. 200 steps give the stream 200 tokens, the same ones
    as without a store, and not one offload has ended."""
    withheld, address = store
    with ExitStack() as stack:
        model = opened(folder, address, stack)
        stream = salted(model, [7, 8, 9], TOKENS)
        model.engine.submit(stream, 0.0)
        found = [token for _ in range(10) for token in tokens_of(model, stream)]
        model.engine.submit(salted(model, LONG, 60), 0.0)
        found += [token for _ in range(TOKENS - 10) for token in tokens_of(model, stream)]
        assert withheld.asked.wait(LIMIT_S)
        assert not withheld.go_on.is_set()
        assert isinstance(model.store, KvStoreClient)
        assert model.store.statistics().stored == 0
        assert model.store.statistics().offered >= 25
        withheld.go_on.set()
    assert found == run_one(open_model(folder), [7, 8, 9], max_tokens=TOKENS, ignore_eos=True).token_ids
    assert len(found) == TOKENS


def test_blocks_of_an_answer_are_handed_over_as_it_grows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of 600 tokens makes 37 blocks: no step copies more than 8 of them, the last one neither."""
    offers: list[int] = []

    class Counting(_Found):
        def offer(self, space: BlockSpace, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
            offers.append(len(blocks))

    monkeypatch.setattr("engines.reference.loaded_model.open_block_store", lambda parameters, shape: Counting(()))
    model = open_model(folder, model_digest="ab" * 32)
    stream = salted(model, [7, 8, 9], 600)
    model.engine.submit(stream, 0.0)
    while model.engine.has_work:
        model.engine.step()
    assert max(offers) <= step_engine.OFFER_BLOCKS
    assert sum(offers) == (3 + 599) // 16  # the last token is never run through the model


class _Found:
    """A store that finds what it is given."""

    def __init__(self, blocks: tuple[BlockArray, ...]) -> None:
        self.blocks = blocks

    def lookup(self, space: BlockSpace, keys: Sequence[bytes], patience_ms: int = 0) -> CachedPrefix:
        """All of it, for a long prompt."""
        return CachedPrefix(self.blocks if len(keys) >= len(self.blocks) else ())

    def offer(self, space: BlockSpace, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
        """Dropped."""

    def flush(self, timeout_s: float) -> bool:
        """At once."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def test_a_stream_gets_a_token_in_every_step_while_a_prefix_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 blocks are copied two a step, so 12 steps; the stream beside them gets 12 tokens in these."""
    plain = open_model(folder)
    shape = plain.block_shape
    monkeypatch.setattr(Pace, "import_bytes", lambda _self, *, beside_streams: 2 * shape.nbytes)
    found = _Found(tuple(np.zeros(shape.dimensions, np.float32) for _ in range(24)))
    monkeypatch.setattr("engines.reference.loaded_model.open_block_store", lambda parameters, shape: found)
    model = open_model(folder, model_digest="ab" * 32)
    stream, other = salted(model, [7, 8, 9], 100), salted(model, LONG, 2)
    model.engine.submit(stream, 0.0)
    model.engine.step()
    model.engine.submit(other, 0.0)
    copied: list[int] = []
    while not copied or model.engine._running[-1].importing:
        assert len(tokens_of(model, stream)) == 1
        copied.append(model.engine._running[-1].imported_blocks)
    assert copied == list(range(2, 25, 2))


def test_what_is_left_of_a_found_prompt_is_computed_a_row_tile_at_a_time_beside_a_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 399 tokens 24 blocks are found: 15 are left. Beside a stream they take 4 steps, 4 + 4 + 4 + 3; alone one."""
    shape, prompt = open_model(folder).block_shape, [5 + place * 7 % 240 for place in range(24 * 16 + 15)]
    found = _Found(tuple(np.zeros(shape.dimensions, np.float32) for _ in range(24)))
    monkeypatch.setattr("engines.reference.loaded_model.open_block_store", lambda parameters, shape: found)
    monkeypatch.setattr(Pace, "import_bytes", lambda _self, *, beside_streams: 24 * shape.nbytes)
    steps = []
    for beside in (True, False):
        model = open_model(folder, model_digest="ab" * 32)
        if beside:
            model.engine.submit(salted(model, [7, 8, 9], 100), 0.0)
            model.engine.step()
        other, count = salted(model, prompt, 2), 1
        model.engine.submit(other, 0.0)
        while not tokens_of(model, other):
            count += 1
        steps.append(count)
    assert steps == [4, 1]


def test_a_handed_over_prompt_is_asked_for_once_and_with_patience(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intake does not wait for it, however quick the store; who waits does so for half of what computing it took:
    25 blocks of 16 tokens at 0.5 ms are 200 ms, so 100. Another prompt is asked for at once, without patience."""
    asked: list[int] = []

    class Counting(_Found):
        def lookup(self, space: BlockSpace, keys: Sequence[bytes], patience_ms: int = 0) -> CachedPrefix:
            asked.append(patience_ms)
            return super().lookup(space, keys, patience_ms)

    shape = open_model(folder).block_shape
    found = Counting(tuple(np.zeros(shape.dimensions, np.float32) for _ in range(25)))
    monkeypatch.setattr("engines.reference.loaded_model.open_block_store", lambda parameters, shape: found)
    model = open_model(folder, model_digest="ab" * 32)
    given = {"salt": SALT, "prompt_token_ids": LONG, "resumed_token_ids": [7], "kv_hold": "request/1"}
    call = accept_call(model, CallInputs("", "", json.dumps(given)))
    assert (call.awaits_more, asked) == (True, [])
    assert len(await_prefix(model, call).request.prefix.blocks) == 25
    assert asked == [100]
    accept_call(model, CallInputs("", "", json.dumps({**given, "kv_hold": ""})))
    assert asked == [100, 0]


def test_copies_are_a_quarter_of_a_decode_step() -> None:
    """Steps of 4 ms: 1 ms of copying, 4 MiB. Nothing measured: as little as possible. Alone: up to 8 MiB."""
    pace = Pace()
    assert pace.import_bytes(beside_streams=True) == 0
    pace.decoded(4.0)
    assert pace.import_bytes(beside_streams=True) == 4 << 20
    assert pace.import_bytes(beside_streams=False) == 8 << 20
    for _ in range(200):
        pace.decoded(100.0)
    assert pace.import_bytes(beside_streams=True) == 8 << 20


class _Reply:
    """Counts tokens, and says when there are so many."""

    def __init__(self) -> None:
        self.tokens = 0
        self.wanted = threading.Condition()

    def send(self, events: Sequence[Event]) -> None:
        """More came."""
        with self.wanted:
            self.tokens += sum(isinstance(event, TokenGenerated) for event in events)
            self.ended = is_final(events[-1])
            self.wanted.notify_all()

    def is_cancelled(self) -> bool:
        """Never."""
        return False

    def abandoned(self) -> None:
        """Never."""

    def wait_for(self, count: int) -> bool:
        """Until there are more than `count`."""
        with self.wanted:
            return self.wanted.wait_for(lambda: self.tokens > count, LIMIT_S)


def test_a_stream_goes_on_while_a_lookup_waits_for_slower_tiers(
    folder: Path, store: tuple[WithheldStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another caller's lookup is answered only after the stream has got 20 more tokens: it gets them meanwhile."""
    withheld, address = store
    monkeypatch.setattr("engines.reference.intake.PATIENCE_MS_MIN", 20_000)
    monkeypatch.setattr("engines.reference.intake.PATIENCE_MS_MAX", 20_000)
    with ExitStack() as stack:
        model = opened(folder, address, stack)
        loop = EngineLoop(model.engine, lambda text: None)
        loop.start()
        stack.callback(loop.close)
        reply = _Reply()
        loop.submit(make_request(model, [7, 8, 9], max_tokens=1000, ignore_eos=True), reply)
        assert reply.wait_for(0)
        call = accept_call(model, CallInputs("", "", f'{{"salt": "{SALT}", "prompt_token_ids": {LONG}}}'))
        assert call.awaits_more
        waiting = threading.Thread(target=await_prefix, args=(model, call))
        waiting.start()
        assert withheld.asked.wait(LIMIT_S)
        assert reply.wait_for(reply.tokens + 20)
        assert waiting.is_alive(), "its lookup has not been answered yet"
        withheld.go_on.set()
        waiting.join(LIMIT_S)
