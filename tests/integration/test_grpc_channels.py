"""Channels to peers that are away."""

import asyncio

from deploy.local.ports import free_ports
from roundhouse.grpc_edge import open_channel

TRIES = 6
WITHIN_S = 12  # six tries take 2 s here; with the library's own back-off 16 s at least (1 + 1.6 + 2.6 + 4.1 + 6.6)


async def test_a_lost_peer_is_tried_again_every_second() -> None:
    """A peer that hangs up at once is dialled six times within seconds: a restarted Triton is found soon."""
    (port,) = free_ports(1)
    tries = asyncio.Semaphore(0)

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.release()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", port), open_channel(f"127.0.0.1:{port}") as channel:
        waiting = asyncio.create_task(channel.channel_ready())
        async with asyncio.timeout(WITHIN_S):
            for _ in range(TRIES):
                await tries.acquire()
        waiting.cancel()
        await asyncio.wait((waiting,))
