"""One real Triton server for each test module of the engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer


@pytest.fixture(scope="module")
def engines(triton: TritonServer) -> Iterator[EngineServer]:
    """The module's server as the tests of engines use it."""
    server = EngineServer(triton.grpc_address, triton.log)
    yield server
    server.client.close()
