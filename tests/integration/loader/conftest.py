"""One Triton a module, and a loader process on it for each test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.infra import TritonServer
from tests.integration.loader.loader_process import LoaderProcess


@pytest.fixture
def loader(triton: TritonServer, nats_url: str, redis_url: str, tmp_path: Path) -> LoaderProcess:
    """A loader that is not started yet: put a catalogue, then `async with` it."""
    return LoaderProcess(triton, nats_url, redis_url, tmp_path / "cache")


@pytest.fixture
async def cleanup() -> AsyncIterator[AsyncExitStack]:
    """Closes what a test opened."""
    async with AsyncExitStack() as stack:
        yield stack
