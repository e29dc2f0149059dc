"""What `roundhouse.bus_client` needs of nats-py's private parts is still there, and still does the same.

nats-py has no public way to write at the end of a turn, or to handle a message where it is read. If one of these fails
after an upgrade: read what changed beside `BusClient`, run `tests/contract/test_event_bus.py`, then note the new state.
"""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from roundhouse.bus_client import BusClient

READ: dict[Callable[..., Any], str] = {
    # Overridden, or what decides when and what the overridden ones are called with; of nats-py 2.16.
    Client._process_msg: "6cff75947e97717a",
    Client._remove_sub: "0791939ce078f393",
    Client._flush_pending: "317c8d7ef54b90b7",
    Client._flusher: "43957ffb357d6d94",
    Client._send_publish: "300b534f8eabee74",
}


@pytest.mark.parametrize(("method", "known"), READ.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_overridden_is_what_was_read(method: Callable[..., Any], known: str) -> None:
    """The SHA-256 of the method's source, from the version that `BusClient` was written against."""
    found = hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16]
    assert found == known, f"nats-py changed {method.__qualname__}: see this file's docstring"


def test_the_fields_are_there() -> None:
    """Set by nats-py's constructors; a name that is gone would make a new, unused one."""
    assert {"_subs", "_pending", "_pending_data_size", "_flush_queue", "_transport", "stats"} <= set(vars(Client()))
    assert {"_io_writer", "_bare_io_writer"} <= set(vars(TcpTransport()))  # type: ignore[no-untyped-call]
    assert "_id" in vars(Subscription(Client(), id=1))
    assert isinstance(BusClient(), Client)
