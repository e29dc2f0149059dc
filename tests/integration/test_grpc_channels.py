"""Channels to peers that are away, or not in their right mind."""

import asyncio
import sys

import grpc

from deploy.local.ports import free_ports
from roundhouse.grpc_edge import open_channel

TRIES = 6
SETTINGS = bytes.fromhex("000000 04 00 00000000")  # RFC 9113: length, type, flags, stream; a server's first frame
SETTINGS_ACK = bytes.fromhex("000000 04 01 00000000")
GOAWAY_UNKNOWN = bytes.fromhex("000008 07 00 00000000 00000000 00011177")  # last stream 0; an error code nobody defined
CALLER = """
import asyncio, sys
import grpc
from roundhouse.grpc_edge import open_channel

async def main():
    async with open_channel(sys.argv[1]) as channel:
        try:
            await channel.unary_unary("/any/Call")(b"", timeout=30)
        except grpc.aio.AioRpcError as error:
            print(error.code().name)

asyncio.run(main())
"""
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


async def test_an_unknown_http2_error_code_ends_the_call_and_not_the_process() -> None:
    """A server, or a proxy before it, says GOAWAY with a code that HTTP/2 does not name: the caller has its refusal and
    lives. Some releases of grpcio abort there, with every other request of the process (decision 0002)."""
    (port,) = free_ports(1)

    async def say_goaway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SETTINGS + SETTINGS_ACK)
        await reader.readuntil(b"/any/Call")  # the call has begun; gRPC does not Huffman-code its path
        writer.write(GOAWAY_UNKNOWN)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_goaway, "127.0.0.1", port):
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CALLER, f"127.0.0.1:{port}", stdout=asyncio.subprocess.PIPE
        )
        said, _ = await asyncio.wait_for(caller.communicate(), 60)
    assert (caller.returncode, said.decode().split()) == (0, [grpc.StatusCode.UNAVAILABLE.name])
