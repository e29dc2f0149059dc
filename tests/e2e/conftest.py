"""The `mesh` fixture: the whole embedded cluster on free ports, with two nodes and the catalogue of `catalogue.py`."""

from collections.abc import Iterator

import pytest

from deploy.local.parts import ClusterOptions
from tests.e2e.catalogue import NODE_BYTES, write_catalogue
from tests.e2e.mesh import Mesh, mesh_running

OPTIONS = ClusterOptions(
    nodes=2,
    device_bytes=NODE_BYTES,
    arena_bytes=16 * 2**20,
    http_port=0,
    grpc_port=0,
    admin_port=0,
    cluster="test",
    drain_seconds=3,
)


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The session's mesh. A test that kills a part brings it back before it ends."""
    root = tmp_path_factory.mktemp("mesh")
    with mesh_running(root / "home", OPTIONS, write_catalogue(root)) as running:
        yield running
