"""A kvstore process for each test, gone at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kvstore.kvstore_process import KvStoreProcess


@pytest.fixture
def kvstore(tmp_path: Path) -> Iterator[KvStoreProcess]:
    """A running kvstore with 4 MiB in slots of 4 KiB, without NATS."""
    process = KvStoreProcess(tmp_path)
    process.start()
    yield process
    process.close()
