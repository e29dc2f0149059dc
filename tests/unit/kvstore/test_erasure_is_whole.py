"""An erasure that is interrupted, refused, or meets other work, leaves nothing of the tenant: no block and no byte."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from roundhouse.errors import Unavailable
from services.kvstore.adapters.segment_files import SegmentFiles
from services.kvstore.adapters.tenant_keys import TenantKeys
from services.kvstore.domain.disk_index import DiskRecord
from services.kvstore.domain.records import Acquired
from services.kvstore.operations.disk_tier import REST_MS
from services.kvstore.operations.fetch_blocks import Wanted
from services.kvstore.ports import BlockCorrupt, DiskFault
from tests.builders.disk_node import LENGTH, SEGMENT, Node, content
from tests.builders.kv_blocks import HOLDER, OTHER_SALT, SALT, chain

KEYS = chain("a", 2)


@pytest.fixture
async def node(tmp_path: Path) -> Iterator[Node]:  # type: ignore[misc]
    """A started node whose disk has a thread for each of a few things at once."""
    made = Node(tmp_path / "data")
    made.threads = ThreadPoolExecutor(4)
    with closing(await made.start()) as started:
        yield started


class Held:
    """A blocking call that waits in its thread until it may go on."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        """In the thread."""
        self.reached.set()
        assert self.may_go_on.wait(30)

    async def until_reached(self) -> None:
        """On the loop."""
        assert await asyncio.to_thread(self.reached.wait, 30)


async def lies_nowhere(node: Node) -> None:
    """Nothing of the tenant is counted, and none of its bytes lie on disk, also for the next process."""
    assert node.service.usage(SALT) == (0, 0, 0, 0)
    assert SALT not in node.service.salts()
    for key in KEYS:
        assert content(key) not in node.file_bytes()
    await node.start()
    assert await node.found(KEYS) == 0


async def test_a_caller_that_leaves_does_not_end_the_erasure(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's time ran out while 2 blocks were still to be overwritten: they count as left until they are, and
    who asks again waits for it."""
    await node.store_and_use(KEYS)
    assert node.files is not None
    held, forget = Held(), node.files.forget

    def slow(salt: bytes) -> None:
        held.wait()
        forget(salt)

    monkeypatch.setattr(node.files, "forget", slow)
    first = asyncio.create_task(node.service.erase_salt(SALT))
    await held.until_reached()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert node.service.usage(SALT)[2] == 2
    assert SALT in node.service.salts()
    again = asyncio.create_task(node.service.erase_salt(SALT))
    held.may_go_on.set()
    assert (await again).blocks_left == 0
    await lies_nowhere(node)


async def test_what_a_disk_refused_to_erase_is_left_until_it_does(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try fails: 2 blocks are left, and nobody finds them. The second one gets them."""
    await node.store_and_use(KEYS)
    assert node.files is not None

    def broken(*_: object) -> None:
        raise DiskFault("input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(node.files, "destroy", broken)
        with pytest.raises(Unavailable):
            await node.service.erase_salt(SALT)
    assert node.service.usage(SALT)[2] == 2
    assert SALT in node.service.salts()
    assert await node.found(KEYS) == 0
    node.clock.advance(REST_MS)
    assert (await node.service.erase_salt(SALT)).blocks_left == 0
    await lies_nowhere(node)


async def test_a_segment_that_could_not_be_removed_is_asked_for_again(tmp_path: Path) -> None:
    """It can be neither overwritten nor unlinked: destroying fails each time until it can."""
    log = SegmentFiles(tmp_path, SEGMENT)
    with closing(log):
        placed = log.append(DiskRecord(b"a/0", SALT, b"model", b"", LENGTH, 1), memoryview(content(b"a/0")))
        with pytest.MonkeyPatch.context() as patched:

            def refuse(*_: object, **__: object) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patched.setattr(os, "pwritev", refuse)
            patched.setattr(Path, "unlink", refuse)
            for _ in range(2):
                with pytest.raises(DiskFault):
                    log.destroy((placed,))
        log.destroy((placed,))
        assert content(b"a/0") not in (tmp_path / "00000000.segment").read_bytes()


async def test_what_was_being_read_or_is_asked_for_meanwhile_does_not_come_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erasure waits for a write of another tenant; a reader with patience comes in between, and gets nothing."""
    await node.store_and_use(KEYS)
    await node.start()
    assert node.files is not None
    held, append = Held(), node.files.append

    def slow(record: DiskRecord, data: memoryview) -> DiskRecord:
        held.wait()
        return append(record, data)

    monkeypatch.setattr(node.files, "append", slow)
    writing = asyncio.create_task(node.store_and_use(chain("b", 1), OTHER_SALT))
    await held.until_reached()
    erasing = asyncio.create_task(node.service.erase_salt(SALT))
    await asyncio.sleep(0)
    outcome = await node.service.acquire_waiting(Wanted(SALT, tuple(KEYS)), HOLDER, 10_000)
    assert not isinstance(outcome, Acquired)
    held.may_go_on.set()
    await writing
    assert (await erasing).blocks_left == 0
    assert await node.found(KEYS) == 0
    await lies_nowhere(node)
    assert await node.found(chain("b", 1), OTHER_SALT) == 1


async def test_a_block_that_is_being_read_when_its_tenant_is_erased_is_not_shown(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes were read before they were overwritten; the erasure ends after that read, and memory has none of it."""
    await node.store_and_use(KEYS)
    await node.start()
    assert node.files is not None
    held, read_into = Held(), node.files.read_into

    def slow(record: DiskRecord, into: memoryview) -> None:
        read_into(record, into)
        held.wait()

    monkeypatch.setattr(node.files, "read_into", slow)
    reading = asyncio.create_task(node.found(KEYS))
    await held.until_reached()
    erasing = asyncio.create_task(node.service.erase_salt(SALT))
    await asyncio.sleep(0)
    held.may_go_on.set()
    assert (await erasing).blocks_left == 0
    assert await reading == 0
    with node.arena.view(0, node.arena.nbytes) as view:
        assert content(KEYS[0]) not in bytes(view)
    await lies_nowhere(node)


async def test_a_block_that_was_written_in_part_leaves_no_bytes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full after a page of the block: what lies there belongs to no block, and is cut off."""

    def short(descriptor: int, buffers: list[memoryview], offset: int, pwritev=os.pwritev) -> int:  # type: ignore[no-untyped-def]
        written: int = pwritev(descriptor, [buffers[0], memoryview(buffers[1])[:4096]], offset)
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", short)
        await node.store_and_use(KEYS)
    assert node.disk.counts().errors == 1
    assert content(KEYS[0])[:4096] not in node.file_bytes()


def test_a_key_that_is_read_while_it_is_destroyed_opens_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader in another thread comes in the middle of it; whatever that one gets, the next one gets nothing."""
    keys = TenantKeys(tmp_path, b"k" * 32)
    sealed = memoryview(bytearray(64 + 16))
    seal = keys.seal(SALT, b"key", memoryview(bytes(64)), sealed)
    reader = threading.Thread(target=lambda: _unsealed(keys, seal, sealed))
    urandom = os.urandom

    def meanwhile(size: int) -> bytes:
        reader.start()
        reader.join(0.05)
        return urandom(size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "urandom", meanwhile)
        keys.forget(SALT)
    reader.join()
    assert not _unsealed(keys, seal, sealed)


def _unsealed(keys: TenantKeys, seal: bytes, sealed: memoryview) -> bool:
    try:
        keys.unseal(SALT, b"key", seal, memoryview(bytearray(sealed)), memoryview(bytearray(64)))
    except BlockCorrupt:
        return False
    return True
