"""Real NATS, Valkey, PostgreSQL and Triton for tests: programs of the wheels, or containers.

`ROUNDHOUSE_TEST_INFRA=containers` takes NATS, Valkey and PostgreSQL from testcontainers; Triton is always the wheel's.
Every server has its own port and folder, can be killed and restarted on the same ones, and is gone at the end.
"""

import os
import socket
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from deploy.local.ports import free_ports
from deploy.local.probes import nats_probe, redis_probe
from deploy.local.server import LocalServer, Program
from deploy.local.stores import nats_program, postgres_binaries, postgres_program, valkey_program
from deploy.local.triton import TritonPorts, triton_program
from roundhouse.environment import test_infrastructure

NATS_IMAGE = "nats:2.12"
VALKEY_IMAGE = "valkey/valkey:9"
POSTGRES_IMAGE = "postgres:15-bookworm"


def containers_wanted() -> bool:
    """Whether the stores come from containers in this run."""
    return test_infrastructure() == "containers"


class FaultyServer(ABC):
    """A server that tests may kill and restart; port and data stay."""

    url: str

    @abstractmethod
    def start(self) -> None:
        """Start and wait until it answers."""

    @abstractmethod
    def stop(self) -> None:
        """End it. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End it with SIGKILL. Idempotent."""

    def restart(self) -> None:
        """Start it again on the same port and data."""
        self.stop()
        self.start()


class ProgramServer(FaultyServer):
    """A server from a wheel or package, as a child process."""

    def __init__(self, make: Callable[[int, Path], Program], url_format: str, folder: Path) -> None:
        (port,) = free_ports(1)
        self.data = folder / "data"
        self.url = url_format.format(port=port)
        self.port = port
        self.server = LocalServer(make(port, folder))

    def start(self) -> None:
        """Start and wait until it answers."""
        self.server.start()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        self.server.stop()

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self.server.kill()


class ContainerServer(FaultyServer):
    """A server in a container with a fixed host port."""

    def __init__(
        self,
        image: str,
        inner_port: int,
        url_format: str,
        probe: Callable[[int], str | None],
        command: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
        from testcontainers.core.container import DockerContainer  # imported late: it dials the engine

        (self.port,) = free_ports(1)
        self.url = url_format.format(port=self.port)
        self._probe = probe
        self._container: Any = DockerContainer(image).with_bind_ports(inner_port, self.port)
        if command:
            self._container.with_command(command)
        for name, value in (environment or {}).items():
            self._container.with_env(name, value)
        self._made = False

    def start(self) -> None:
        """Create or start the container and wait until it answers."""
        if self._made:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._made = True
        wait_until(partial(self._probe, self.port), within_s=60)

    def stop(self) -> None:
        """Stop the container, keeping its data. Idempotent."""
        if self._made:
            self._container.get_wrapped_container().stop(timeout=3)

    def kill(self) -> None:
        """Kill the container, keeping its data. Idempotent."""
        if self._made:
            self._container.get_wrapped_container().kill()

    def remove(self) -> None:
        """Remove the container and its data."""
        if self._made:
            self._container.stop(force=True, delete_volume=True)


def wait_until(probe: Callable[[], str | None], *, within_s: float) -> None:
    """Probe until it answers None. Raises TimeoutError with the last reason."""
    import time

    deadline = time.monotonic() + within_s
    while (reason := probe()) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError(reason)
        time.sleep(0.03)


@contextmanager
def nats_running(folder: Path) -> Iterator[FaultyServer]:
    """NATS with JetStream for one test or session."""
    if containers_wanted():
        yield from _container(ContainerServer(NATS_IMAGE, 4222, "nats://127.0.0.1:{port}", nats_probe, "-js -sd /data"))
    else:
        yield from _program(
            ProgramServer(
                lambda port, where: nats_program("nats", port, where / "data", where / "nats.log"),
                "nats://127.0.0.1:{port}",
                folder,
            )
        )


@contextmanager
def valkey_running(folder: Path) -> Iterator[FaultyServer]:
    """Valkey for one test or session."""
    if containers_wanted():
        command = "valkey-server --bind 0.0.0.0 --protected-mode no --appendonly yes"
        yield from _container(ContainerServer(VALKEY_IMAGE, 6379, "redis://127.0.0.1:{port}/0", redis_probe, command))
    else:
        yield from _program(
            ProgramServer(
                lambda port, where: valkey_program("valkey", port, where / "data", where / "valkey.log"),
                "redis://127.0.0.1:{port}/0",
                folder,
            )
        )


@contextmanager
def postgres_running() -> Iterator[FaultyServer]:
    """PostgreSQL with an empty database: user and database are `postgres`.

    Its folder is made directly under the temporary folder, where the user `postgres` may enter."""
    if containers_wanted():
        url = "postgresql+psycopg://postgres:test@127.0.0.1:{port}/postgres"
        environment = {"POSTGRES_PASSWORD": "test"}
        yield from _container(ContainerServer(POSTGRES_IMAGE, 5432, url, _postgres_probe, environment=environment))
        return
    folder = Path(tempfile.mkdtemp(prefix="rh-postgres-"))
    folder.chmod(0o755)
    try:
        yield from _program(
            ProgramServer(
                # The log is opened by us before the process changes its user.
                lambda port, where: postgres_program("postgres", port, where / "data", where / "postgres.log"),
                "postgresql+psycopg://postgres@127.0.0.1:{port}/postgres",
                folder,
            )
        )
    finally:
        rmtree(folder, ignore_errors=True)


def postgres_missing() -> str | None:
    """Why there is no PostgreSQL for tests here; None if there is one."""
    if containers_wanted() or postgres_binaries() is not None:
        return None
    return "no PostgreSQL: install postgresql-15, or set ROUNDHOUSE_TEST_INFRA=containers"


def _postgres_probe(port: int) -> str | None:
    import psycopg

    try:
        psycopg.connect(f"postgresql://postgres:test@127.0.0.1:{port}/postgres", connect_timeout=1).close()
    except psycopg.Error as error:
        return str(error)
    return None


def _program(server: ProgramServer) -> Iterator[ProgramServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _container(server: ContainerServer) -> Iterator[ContainerServer]:
    try:
        server.start()
        yield server
    finally:
        server.remove()


class TritonServer(ProgramServer):
    """One real Triton server with explicit model control."""

    def __init__(self, folder: Path) -> None:
        grpc, http, metrics = free_ports(3)
        self.ports = TritonPorts(grpc, http, metrics)
        self.folder = folder
        self.model_repository = folder / "models"
        self.log = folder / "triton.log"
        self.grpc_address = f"127.0.0.1:{grpc}"
        self.http_address = f"127.0.0.1:{http}"
        self.url = self.grpc_address
        self.port = grpc
        self.shared_memory_prefix = f"rh-test-{uuid.uuid4().hex[:8]}-"
        self.server = LocalServer(
            triton_program("triton", self.ports, folder, self.log, shared_memory_prefix=self.shared_memory_prefix)
        )


class NatsAdmin:
    """Just enough of the NATS protocol, over a plain socket, to empty JetStream between tests."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("nats://").rpartition(":")
        self._connection = socket.create_connection((host, int(port)), 5)
        self._reader = self._connection.makefile("rb")
        self._reader.readline()
        self._connection.sendall(b'CONNECT {"verbose":false,"headers":false}\r\nSUB admin.inbox 1\r\n')

    def call(self, subject: str) -> bytes:
        """The JetStream API's JSON answer."""
        self._connection.sendall(f"PUB {subject} admin.inbox 0\r\n\r\n".encode())
        while not (line := self._reader.readline()).startswith(b"MSG "):
            if line.startswith(b"PING"):
                self._connection.sendall(b"PONG\r\n")
            elif not line:
                raise ConnectionError("NATS closed the connection")
        return self._reader.read(int(line.split()[-1]) + 2)

    def close(self) -> None:
        """Disconnect."""
        self._reader.close()
        self._connection.close()


def empty_jetstream(url: str) -> None:
    """Delete every stream, key-value buckets included."""
    import json

    admin = NatsAdmin(url)
    try:
        for name in json.loads(admin.call("$JS.API.STREAM.NAMES")).get("streams") or []:
            admin.call(f"$JS.API.STREAM.DELETE.{name}")
    finally:
        admin.close()


def flush_redis(url: str) -> None:
    """FLUSHALL; in a cluster on every primary that the URL names."""
    hosts = url.rpartition("://")[2].partition("/")[0].split(",")
    for host in hosts:
        with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), 5) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            answer = connection.recv(64)
            assert answer.startswith(b"+OK") or (len(hosts) > 1 and answer.startswith(b"-READONLY")), answer
