"""A real metering process beside real NATS and Valkey, and what tests ask it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.ports import free_ports
from roundhouse import subjects
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.redis_edge import open_redis
from services.metering.adapters.usage_wire import encode_event
from services.metering.domain.usage import UsageFacts
from tests.builders.usage import priced_catalogue

START_S = 20.0


class MeteringProcess:
    """`python -m services.metering`, to be killed and started again on the same ledger."""

    def __init__(self, nats_url: str, redis_url: str, folder: Path) -> None:
        self.http_port, self.ops_port = free_ports(2)
        self._log = folder / "metering.log"
        self.ledger_path = folder / "ledger.sqlite3"
        self._environment = os.environ | {
            "ROUNDHOUSE_NATS_URL": nats_url,
            "ROUNDHOUSE_REDIS_URL": redis_url,
            "ROUNDHOUSE_LEDGER_URL": f"sqlite:///{self.ledger_path}",
            "ROUNDHOUSE_HTTP_PORT": str(self.http_port),
            "ROUNDHOUSE_OPS_PORT": str(self.ops_port),
            "ROUNDHOUSE_LOG_LEVEL": "debug",
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start; does not wait."""
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "services.metering"]
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; the exit status. Idempotent."""
        if self._process is None:
            return 0
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        return self._process.wait(30)

    def ready(self) -> bool:
        """Whether it says that it is ready."""
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.ops_port}/health/ready", timeout=2).status_code == 200
        return False

    def get(self, path: str, **parameters: str) -> Any:
        """The JSON that a query answers."""
        answer = httpx.get(f"http://127.0.0.1:{self.http_port}{path}", params=parameters, timeout=60)
        return answer.json()

    def metrics(self) -> str:
        """The Prometheus page."""
        return httpx.get(f"http://127.0.0.1:{self.ops_port}/metrics", timeout=60).text

    def log(self) -> str:
        """What it logged."""
        return self._log.read_text()


def wait_for(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Look until it holds. Fails with `what`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)


@pytest.fixture
async def priced_redis(redis_url: str) -> str:
    """A Valkey that holds `priced_catalogue`."""
    redis = open_redis(redis_url)
    await CatalogueStore(redis).put(priced_catalogue(), expected_generation=0)
    await redis.aclose()
    return redis_url


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    """A bus whose streams exist."""
    connected = await connect_bus(nats_url, name="test")
    yield connected
    await connected.close()


@pytest.fixture
def metering(nats_url: str, priced_redis: str, tmp_path: Path) -> Iterator[MeteringProcess]:
    """A metering process, not started, on the session's servers."""
    process = MeteringProcess(nats_url, priced_redis, tmp_path)
    yield process
    process.end(signal.SIGKILL)


async def emit(bus: NatsBus, *events: UsageFacts, message_id: str | None = None) -> None:
    """Publish as a gateway does."""
    for event in events:
        name = message_id or f"{event.event_id}:{event.emitter}:{event.tenant_id}"
        await bus.publish_durable(
            subjects.usage(event.tenant_id), encode_event(event).SerializeToString(), message_id=name
        )
