"""A model that vLLM's CPU build takes, and a kvstore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.checkpoints import random_checkpoint
from tests.integration.kvstore.kvstore_process import KvStoreProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with heads of 32, which vLLM's CPU attention takes."""
    return random_checkpoint(tmp_path_factory.mktemp("weights") / "m", 1, hidden_size=128, intermediate_size=96)


@pytest.fixture
def kvstore(tmp_path: Path) -> Iterator[KvStoreProcess]:
    """A running kvstore of 64 MiB: a block of 32 tokens is 64 KiB."""
    process = KvStoreProcess(tmp_path, arena_bytes=64 << 20)
    process.start()
    yield process
    process.close()
