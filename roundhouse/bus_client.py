"""nats-py's client with two short ways for what every request does several times.

What is published in one turn of the loop is written at its end, by a callback instead of a task that is woken through a
queue. Messages without headers for a subscription that handles them at once are handed over where they are read,
instead of through another queue and another task. Whatever is not ordinary (no connection, a socket that takes no more,
headers, TLS or WebSocket transports, flow control) goes nats-py's own way. Invariant: publishes keep their order.

This is the one place that uses nats-py's private names (they begin with `_`): its public API writes and calls back
through queues only. `tests/unit/roundhouse/test_bus_client.py` fails when a new nats-py has changed one of them.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.transport import TcpTransport

UNSENT_BYTES_MAX = 64 * 1024  # above it nats-py's flusher waits until the socket takes more

AtOnce = Callable[[str, bytes, str], None]
"""Takes subject, data and reply subject of a message. Never waits, never raises."""


class BusClient(Client):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._at_once: dict[int, AtOnce] = {}
        self._flushes_soon = False

    async def subscribe_at_once(self, subject: str, handler: AtOnce, *, otherwise: Any, queue: str = "") -> Any:
        """Subscribe; messages without headers go to `handler`, others to `otherwise`, nats-py's kind of callback."""
        subscription: Any = await self.subscribe(subject, queue=queue, cb=otherwise)
        self._at_once[subscription._id] = handler
        return subscription

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._at_once.get(sid) if not headers else None
        if handler is None or sid not in self._subs:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        handler(subject.decode(), bytes(data), reply.decode())

    def _remove_sub(self, sid: int, *arguments: Any) -> Any:
        self._at_once.pop(sid, None)
        return super()._remove_sub(sid, *arguments)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self._may_write():
            return await super()._flush_pending(force_flush)
        if not self._flushes_soon:
            self._flushes_soon = True
            asyncio.get_running_loop().call_soon(self._flush_now)
        return None

    def _may_write(self) -> bool:
        """Whether the socket is an ordinary one that takes more."""
        transport = self._transport
        if not self.is_connected or not isinstance(transport, TcpTransport):
            return False
        writer = transport._io_writer
        if writer is None or transport._bare_io_writer is not writer or writer.transport.is_closing():
            return False
        return bool(writer.transport.get_write_buffer_size() < UNSENT_BYTES_MAX)

    def _flush_now(self) -> None:
        self._flushes_soon = False
        if not self._pending or not self.is_connected:
            return  # the next connection writes it
        if not self._may_write():
            if self._flush_queue is not None and self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        assert self._transport is not None
        try:
            self._transport.writelines(pending)
        except (OSError, RuntimeError):  # it broke just now: the next connection writes them
            self._pending = [*pending, *self._pending]
            self._pending_data_size += sum(map(len, pending))
