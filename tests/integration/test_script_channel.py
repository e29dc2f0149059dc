"""The connection that all scripts of a process share, on a real store and on bad ones."""

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import hiredis
import pytest

from deploy.local.ports import free_ports
from roundhouse.environment import redis_under_test
from roundhouse.redis_edge import open_redis
from roundhouse.script_channel import ChannelLost, ScriptChannel, Server
from tests.infra import FaultyServer

pytestmark = pytest.mark.skipif(redis_under_test() == "cluster", reason="the connection to one server")


def channel_to(url: str, *, timeout_s: float = 30, database: int = 0) -> ScriptChannel:
    """A channel to a test's server."""
    address = urlsplit(url)
    server = Server(str(address.hostname), int(address.port or 0), database)
    return ScriptChannel(server, timeout_s=timeout_s, connect_timeout_s=30)


async def test_every_caller_gets_its_own_answer_also_beside_cancelled_ones(redis_url: str) -> None:
    """Case B37: of 500 calls at once every third is cancelled; the others each get what they asked for."""
    channel = channel_to(redis_url)
    calls = [asyncio.ensure_future(channel.call("ECHO", f"n{number}")) for number in range(500)]
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for number, answer in enumerate(answers):
        assert isinstance(answer, asyncio.CancelledError) if number % 3 == 0 else answer == f"n{number}".encode()
    await channel.close()


async def test_it_uses_the_database_it_was_told(redis_url: str) -> None:
    """SELECT goes first, on every connection."""
    third, first = channel_to(redis_url, database=3), channel_to(redis_url)
    await third.call("SET", "where", "here")
    assert await third.call("GET", "where") == b"here"
    assert await first.call("GET", "where") is None
    await third.close()
    assert await third.call("GET", "where") == b"here", "it connects again"
    await third.close()
    await first.close()


async def test_an_error_of_the_server_is_a_value_and_the_channel_goes_on(redis_url: str) -> None:
    """One wrong command is nobody else's trouble."""
    channel = channel_to(redis_url)
    wrong, right = await channel.call_each([("NONSENSE",), ("ECHO", "x")])
    assert isinstance(wrong, hiredis.ReplyError)
    assert right == b"x"
    await channel.close()


async def test_a_refused_login_is_told(redis_url: str) -> None:
    """A password that the server does not know: no call goes through."""
    address = urlsplit(redis_url)
    server = Server(str(address.hostname), int(address.port or 0), username="nobody", password="wrong")
    channel = ScriptChannel(server, timeout_s=30, connect_timeout_s=30)
    with pytest.raises(ChannelLost):
        await channel.call("PING")
    await channel.close()


async def test_a_killed_store_fails_calls_in_flight_and_a_restarted_one_is_found(valkey_server: FaultyServer) -> None:
    """A call that waits hears of the loss; later ones connect anew."""
    channel = channel_to(valkey_server.url)
    assert await channel.call("ECHO", "x") == b"x"
    waiting = asyncio.ensure_future(channel.call("BLPOP", "never", 0))
    await asyncio.sleep(0.05)
    valkey_server.kill()
    with pytest.raises(ChannelLost):
        await waiting
    with pytest.raises(OSError):
        await channel.call("PING")
    await asyncio.to_thread(valkey_server.restart)
    assert await channel.call("ECHO", "y") == b"y"
    await channel.close()


@pytest.mark.parametrize("answer", [b"", b"no redis\r\n", b"+one\r\n+too many\r\n"])
async def test_a_server_that_says_nothing_or_nonsense_is_hung_up_on(answer: bytes) -> None:
    """Silence of 200 ms, words that are no reply, and a reply too many: calls fail, none gets another's answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await reader.read()
        writer.close()

    (port,) = free_ports(1)
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        channel = channel_to(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        first: Any = (await asyncio.gather(channel.call("PING"), return_exceptions=True))[0]
        assert isinstance(first, ChannelLost) or first == b"one"
        with pytest.raises(ChannelLost):
            await asyncio.gather(channel.call("PING"), channel.call("PING"), channel.call("PING"))
        await channel.close()


async def test_a_primary_that_was_demoted_is_left_for_the_new_one(valkey_server: FaultyServer, redis_url: str) -> None:
    """A failover behind one address (a service, a proxy): the demoted primary still answers on the old connection; the
    call that hears READONLY fails, and the next one goes to whoever is behind the address now."""
    primaries = [urlsplit(valkey_server.url), urlsplit(redis_url)]

    carried: list[asyncio.Task[Any] | None] = []

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                target.write(data)
        target.close()
        with suppress(OSError):
            await target.wait_closed()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carried.append(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection(primaries[0].hostname, primaries[0].port)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    (port,) = free_ports(1)
    async with await asyncio.start_server(carry, "127.0.0.1", port):
        channel, direct = channel_to(f"redis://127.0.0.1:{port}/0"), channel_to(valkey_server.url)
        assert await channel.call("SET", "x", "1") == b"OK"
        assert await direct.call("REPLICAOF", "127.0.0.1", str(primaries[1].port)) == b"OK"
        primaries.reverse()
        assert isinstance(await channel.call("SET", "x", "2"), hiredis.ReplyError)
        assert await channel.call("SET", "x", "3") == b"OK"
        await direct.close()
        await channel.close()
        await asyncio.gather(*(task for task in carried if task))


async def test_a_store_behind_tls_is_left_to_the_library() -> None:
    """What the channel does not speak goes through redis-py."""
    for url in ("rediss://127.0.0.1:1/0", "unix:///nowhere", "rediss+cluster://127.0.0.1:1"):
        redis = open_redis(url)
        assert redis.scripts is None
        await redis.aclose()


async def test_a_patient_call_leaves_with_the_next_one_or_soon_by_itself(redis_url: str) -> None:
    """Alone it is answered too; before another call it is answered first; cancelled, it takes nobody's answer."""
    channel = channel_to(redis_url)
    assert await channel.call_patiently("ECHO", "alone") == b"alone"
    first = asyncio.ensure_future(channel.call_patiently("RPUSH", "order", "patient"))
    gone = asyncio.ensure_future(channel.call_patiently("ECHO", "nobody"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await channel.call("RPUSH", "order", "hurried") == 2
    assert await first == 1
    assert await channel.call("ECHO", "next") == b"next"
    await channel.close()
