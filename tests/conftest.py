"""Fixtures that start real servers. See `tests/infra.py`.

`nats_url` and `redis_url` share one server each over the session and give every test an empty one; `nats_server` and
`valkey_server` are the test's own, to be killed and restarted. `triton` and `triton_factory` start real Triton servers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from roundhouse.environment import redis_under_test
from tests import infra
from tests.valkey_cluster import ValkeyCluster, valkey_cluster_running


@pytest.fixture(scope="session")
def session_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[infra.FaultyServer]:
    """The session's NATS with JetStream. Tests must not stop it."""
    with infra.nats_running(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="session")
def session_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[infra.FaultyServer]:
    """The session's Valkey. Tests must not stop it."""
    with infra.valkey_running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def nats_url(session_nats: infra.FaultyServer) -> str:
    """URL of a NATS server without streams."""
    infra.empty_jetstream(session_nats.url)
    return session_nats.url


@pytest.fixture(scope="session")
def session_valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """The session's Valkey cluster. A test that kills a node starts it again and waits until it is in step."""
    with valkey_cluster_running(tmp_path_factory.mktemp("valkey-cluster")) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(session_valkey_cluster: ValkeyCluster) -> ValkeyCluster:
    """An empty Valkey cluster of three primaries with a replica each."""
    infra.flush_redis(session_valkey_cluster.url)
    return session_valkey_cluster


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty Valkey; of a cluster with `ROUNDHOUSE_TEST_REDIS=cluster`."""
    if redis_under_test() == "cluster":
        return str(request.getfixturevalue("redis_cluster").url)
    server: infra.FaultyServer = request.getfixturevalue("session_valkey")
    infra.flush_redis(server.url)
    return server.url


@pytest.fixture
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[infra.FaultyServer]:
    """A NATS server of this test's own: `url`, `kill()`, `restart()`."""
    with infra.nats_running(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[infra.FaultyServer]:
    """A Valkey server of this test's own: `url`, `kill()`, `restart()`."""
    with infra.valkey_running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """SQLAlchemy URL of an empty PostgreSQL database; skips, saying why, where there is none."""
    if (reason := infra.postgres_missing()) is not None:
        pytest.skip(reason)
    with infra.postgres_running() as server:
        yield server.url


TritonFactory = Callable[[], infra.TritonServer]


@pytest.fixture(scope="module")
def triton_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonFactory]:
    """Starts Triton servers (about a second each) that live until the module's end."""
    with ExitStack() as running:

        def start() -> infra.TritonServer:
            folder: Path = tmp_path_factory.mktemp("triton")
            server = infra.TritonServer(folder)
            running.callback(server.kill)
            server.start()
            return server

        yield start


@pytest.fixture(scope="module")
def triton(triton_factory: TritonFactory) -> infra.TritonServer:
    """The module's Triton server, without models."""
    return triton_factory()
