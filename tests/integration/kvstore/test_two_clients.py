"""Two engines on one kvstore, in processes of their own, and what stays when one of them dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engines.reference.kv_cache import BlockArray, BlockShape, BlockSpace
from engines.reference.kvstore_client import KvStoreClient
from roundhouse.block_keys import prefix_block_keys, tenant_salt
from roundhouse.wire.v1 import kv_pb2
from tests.integration.kvstore import doomed_engine
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually

SHAPE = BlockShape(layers=2, kv_heads=2, block_tokens=16, head_dim=8)  # 2*2*2*16*8*4 = 4,096 bytes: one slot
ONE, TWO = tenant_salt("cluster", "one"), tenant_salt("cluster", "two")


def keys(salt: bytes, blocks: int, first_token: int = 0) -> list[bytes]:
    """Keys of a prompt that begins with `first_token`."""
    return prefix_block_keys(salt, b"model", b"", 16, range(first_token, first_token + 16 * blocks))


def blocks(count: int, seed: int = 0) -> list[BlockArray]:
    """Random states."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(SHAPE.dimensions).astype(np.float32) for _ in range(count)]


@pytest.fixture
def engine(kvstore: KvStoreProcess) -> Iterator[KvStoreClient]:
    """One engine's client."""
    client = KvStoreClient(kvstore.address, SHAPE, b"model")
    assert client.wait_until_mapped(10)
    yield client
    client.close()


@pytest.fixture
def second_engine(kvstore: KvStoreProcess) -> Iterator[KvStoreClient]:
    """Another engine's client, with an arena mapping of its own."""
    client = KvStoreClient(kvstore.address, SHAPE, b"model")
    assert client.wait_until_mapped(10)
    yield client
    client.close()


def found(client: KvStoreClient, salt: bytes, prompt: list[bytes], patience_ms: int = 1_000) -> tuple[BlockArray, ...]:
    """What a patient engine finds: on a machine under test a call may be late, which is a miss."""
    for _ in range(20):
        before = client.statistics().failures
        prefix = client.lookup(BlockSpace(salt), prompt, patience_ms)
        copies = tuple(block.copy() for block in prefix.blocks)
        right = prefix.verified(len(copies))
        prefix.release()
        if client.statistics().failures == before:
            return copies[:right]
        time.sleep(0.3)
    raise AssertionError("every lookup failed")


def store(client: KvStoreClient, salt: bytes, prompt: list[bytes], states: list[BlockArray]) -> None:
    """Offer and wait until all are stored."""
    before = client.statistics().stored
    client.offer(BlockSpace(salt), prompt, states)
    assert client.flush(10)
    assert client.statistics().stored == before + len(states)


def test_what_one_engine_stores_another_reads_bit_for_bit(engine: KvStoreClient, second_engine: KvStoreClient) -> None:
    """3 blocks of 3 come back equal in the other process's mapping; a longer prompt finds its first 3."""
    prompt, states = keys(ONE, 5), blocks(3)
    store(engine, ONE, prompt[:3], states)
    read = found(second_engine, ONE, prompt)
    assert len(read) == 3
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(states, read, strict=True))


def test_another_tenants_salt_finds_nothing(engine: KvStoreClient) -> None:
    """B25, invariant 11: neither with its own keys of the same prompt, nor with the first tenant's very keys."""
    store(engine, ONE, keys(ONE, 2), blocks(2))
    assert found(engine, TWO, keys(TWO, 2)) == ()
    assert found(engine, TWO, keys(ONE, 2)) == ()
    assert len(found(engine, ONE, keys(ONE, 2))) == 2


def test_a_full_arena_makes_room_and_the_books_balance(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """1,024 slots; 20 prompts of 64 blocks are 1,280: at least 256 leave, and the newest prompt is whole."""
    for number in range(20):
        store(engine, ONE, keys(ONE, 64, first_token=10_000 * number), blocks(64, number))
    counts = kvstore.statistics()
    assert (counts.slots_total, counts.slots_free + counts.slots_held) == (1_024, 1_024)
    assert counts.blocks == 1_280 - counts.evictions <= 1_024
    read = found(engine, ONE, keys(ONE, 64, first_token=190_000))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(blocks(64, 19), read, strict=True))


def test_what_a_killed_engine_held_comes_back_with_its_leases(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """It leased 2 blocks and half-wrote 3 of another prompt. After its leases nothing is leased, the half-written
    blocks were never seen, and their slots are free: 1,024 - 2 stored ones."""
    leased, half_written = keys(ONE, 2), keys(ONE, 3, first_token=5_000)
    store(engine, ONE, leased, blocks(2))
    assert engine.flush(5)
    prompts = [",".join(key.hex() for key in prompt) for prompt in (leased, half_written)]
    command = [sys.executable, "-m", doomed_engine.__name__, kvstore.address, ONE.hex(), *prompts]
    doomed = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == b"2 3\n"
    doomed.kill()
    doomed.communicate(timeout=60)
    held = kvstore.statistics()
    assert (held.leases, held.slots_held, held.slots_leased) == (2, 5, 5)
    assert found(engine, ONE, half_written) == ()
    eventually(lambda: kvstore.statistics().leases == 0)
    after = kvstore.statistics()
    assert (after.slots_held, after.slots_leased, after.leases_expired) == (2, 0, 2)
    store(engine, ONE, half_written, blocks(3))
    assert len(found(engine, ONE, leased)) == 2


def test_erasing_a_tenant_drops_its_blocks_only(kvstore: KvStoreProcess, engine: KvStoreClient) -> None:
    """3 blocks of 4,096 bytes go; the other tenant keeps 2."""
    store(engine, ONE, keys(ONE, 3), blocks(3))
    store(engine, TWO, keys(TWO, 2), blocks(2))
    erased = kvstore.stub.EraseSalt(kv_pb2.EraseSaltRequest(salt=ONE), timeout=60)
    assert (erased.blocks, erased.bytes) == (3, 3 * 4096)
    assert found(engine, ONE, keys(ONE, 3)) == ()
    assert len(found(engine, TWO, keys(TWO, 2))) == 2
