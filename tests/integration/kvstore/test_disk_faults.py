"""A kvstore whose disk is full, unusable or wrong: counted, said, and no request is harmed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engines.reference.kvstore_client import KvStoreClient
from tests.integration.kvstore.kvstore_process import KvStoreProcess, eventually
from tests.integration.kvstore.test_two_clients import ONE, SHAPE, blocks, found, keys, store

FILE_BYTES_MAX = 5 << 20  # the arena has 4 MiB; a segment wants 64


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[KvStoreProcess]:
    """A kvstore that may write no file longer than 5 MiB: what a full disk is to it."""
    process = KvStoreProcess(tmp_path, data_dir=tmp_path / "data", file_bytes_max=FILE_BYTES_MAX)
    process.start()
    yield process
    process.close()


def engine_of(kvstore: KvStoreProcess) -> KvStoreClient:
    """An engine's client."""
    client = KvStoreClient(kvstore.address, SHAPE, b"model")
    assert client.wait_until_mapped(30)
    return client


def test_a_full_disk_is_counted_and_everything_else_goes_on(full_disk: KvStoreProcess) -> None:
    """800 used blocks take 6.5 MB on disk, of which 5 fit: the rest stays in memory, and all are found."""
    with closing(engine_of(full_disk)) as engine:
        for number in range(13):
            prompt = keys(ONE, 64, first_token=10_000 * number)
            store(engine, ONE, prompt, blocks(64, number))
            assert len(found(engine, ONE, prompt)) == 64
        eventually(lambda: full_disk.statistics().disk.errors >= 1, within_s=30)
        assert "disk_fault" in full_disk.log_text()
        written = full_disk.statistics().disk.written
        assert 0 < written < 13 * 64
        assert len(found(engine, ONE, keys(ONE, 64, first_token=120_000))) == 64


def test_a_folder_that_cannot_be_used_leaves_memory(tmp_path: Path) -> None:
    """Where the folder should be there is a file: the process starts without a disk and says so."""
    (tmp_path / "data").write_text("in the way")
    with closing(KvStoreProcess(tmp_path, data_dir=tmp_path / "data")) as kvstore:
        kvstore.start()
        with closing(engine_of(kvstore)) as engine:
            store(engine, ONE, keys(ONE, 2), blocks(2))
            assert len(found(engine, ONE, keys(ONE, 2))) == 2
        assert "no_disk_tier" in kvstore.log_text()


def test_a_wrong_byte_and_a_cut_file_are_misses(tmp_path: Path) -> None:
    """Of 4 blocks on disk the third has a wrong byte: 2 come back, 1 is counted. Cut after the first: 1 comes back."""
    with closing(KvStoreProcess(tmp_path, data_dir=tmp_path / "data")) as kvstore:
        kvstore.start()
        with closing(engine_of(kvstore)) as engine:
            store(engine, ONE, keys(ONE, 4), blocks(4))
            assert len(found(engine, ONE, keys(ONE, 4))) == 4
            eventually(lambda: kvstore.statistics().disk.blocks == 4, within_s=30)
        kvstore.kill()
        (path,) = (tmp_path / "data").glob("*.segment")
        flip(path, 2 * 8_192 + 4_096 + 100)  # a record is a page of header and a page of block
        kvstore.start()
        with closing(engine_of(kvstore)) as engine:
            eventually(lambda: len(found(engine, ONE, keys(ONE, 4))) == 2, within_s=30)
        assert kvstore.statistics().disk.corrupt == 1
        kvstore.kill()
        os.truncate(path, 8_192 + 5_000)
        kvstore.start()
        with closing(engine_of(kvstore)) as engine:
            eventually(lambda: len(found(engine, ONE, keys(ONE, 4))) == 1, within_s=30)


def test_an_encrypted_disk_survives_the_process_and_needs_its_key(tmp_path: Path) -> None:
    """Blocks come back with the key's file; a key that cannot be read keeps the process from starting at all."""
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    with closing(KvStoreProcess(tmp_path, data_dir=tmp_path / "data", disk_key_file=key)) as kvstore:
        kvstore.start()
        with closing(engine_of(kvstore)) as engine:
            store(engine, ONE, keys(ONE, 3), blocks(3))
            assert len(found(engine, ONE, keys(ONE, 3))) == 3
            eventually(lambda: kvstore.statistics().disk.blocks == 3, within_s=30)
        kvstore.kill()
        kvstore.start()
        with closing(engine_of(kvstore)) as engine:
            eventually(lambda: len(found(engine, ONE, keys(ONE, 3))) == 3, within_s=30)
        kvstore.kill()
        key.unlink()
        assert kvstore.run_to_the_end() != 0


def flip(path: Path, at: int) -> None:
    """One wrong byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
