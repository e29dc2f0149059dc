"""A TCP proxy that delivers everything late, so that calls can be cancelled while their answers are on the way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DelayProxy:
    """Counts the connections that go through it."""

    def __init__(self, host: str, port: int, delay_s: float) -> None:
        self._target = (host, port)
        self._delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.open = 0
        self.open_max = 0

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry bytes both ways until either side closes."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        self.open_max = max(self.open_max, self.open)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, far_writer))
                group.create_task(self._carry(far_reader, writer))
        except* OSError:
            pass  # a side that is gone ends the pair, as in any network
        finally:
            for side in writers:
                side.close()
            self.open -= 1
            self._tasks.discard(task)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Keep order; each piece waits its delay from when it came, not from when the last one left."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            loop = asyncio.get_running_loop()
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    break
                target.write(data)
                await target.drain()
            target.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while True:
                try:
                    data = await source.read(65_536)
                except OSError:
                    data = b""
                pieces.put_nowait((asyncio.get_running_loop().time() + self._delay_s, data))
                if not data:
                    break

    async def close(self) -> None:
        """End what is still being carried."""
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close at the next turn of the loop


@asynccontextmanager
async def delayed(host: str, port: int, delay_s: float) -> AsyncIterator[tuple[DelayProxy, int]]:
    """A proxy in front of host:port while the context is open; yields it and its port."""
    proxy = DelayProxy(host, port, delay_s)
    server = await asyncio.start_server(proxy.on_connection, "127.0.0.1", 0)
    try:
        yield proxy, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await proxy.close()
