"""What becomes of NIXL's buffers when a read does not end, fails, or is given up. NIXL itself is played here; the real
one is held to the contract in tests/contract/test_peer_transport.py, where it is installed."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from roundhouse.errors import Unavailable
from services.kvstore.adapters import nixl_agent
from services.kvstore.adapters.nixl_agent import STUCK_MAX, NixlAgent, Source
from services.kvstore.ports import PeerFault

SOURCE = Source("far", 0, 1 << 20)


class Handle:
    """A transfer whose state the test sets."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.state = "PROC"

    def release(self) -> None:
        """As NIXL: not while it runs."""
        if self.state == "PROC":
            raise RuntimeError("NIXL_ERR_NOT_ALLOWED")


class PlayedNixl:
    """One agent; transfers go on until the test says otherwise."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.registered = 0

    def register_memory(self, *_: object, **__: object) -> object:
        """Counts buffers."""
        self.registered += 1
        return object()

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], _: str) -> list[tuple[int, int, int]]:
        """As they are."""
        return descriptors

    def initialize_xfer(self, _: str, here: list[tuple[int, int, int]], *__: object) -> Handle:
        """A new transfer into `here`."""
        self.handles.append(Handle(here[0][0]))
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        """Begins."""
        return handle.state

    check_xfer_state = transfer


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedNixl:
    """NIXL as the agent finds it."""
    played = PlayedNixl()
    module = SimpleNamespace(nixl_agent=lambda *_: played, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "_module", lambda: module)
    return played


@pytest.fixture
def agent(played: PlayedNixl) -> Iterator[NixlAgent]:
    """The agent over it."""
    agent = NixlAgent("nixl-ucx", "near")
    yield agent
    agent.close()


async def begun(played: PlayedNixl, count: int) -> None:
    """Wait until more than `count` transfers have begun on the agent's thread."""
    async with asyncio.timeout(30):
        for _ in iter(lambda: len(played.handles) > count, True):
            await asyncio.sleep(0)


async def given_up(agent: NixlAgent, played: PlayedNixl) -> Handle:
    """A read that is cancelled while it runs."""
    count = len(played.handles)
    task = asyncio.create_task(_read(agent))
    await begun(played, count)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return played.handles[-1]


async def _read(agent: NixlAgent) -> None:
    async with agent.read(SOURCE, [(0, 64)]):
        pass


async def ended_read(agent: NixlAgent, played: PlayedNixl, state: str = "DONE") -> Handle:
    """A read that ends in `state`."""
    count = len(played.handles)
    task = asyncio.create_task(_read(agent))
    await begun(played, count)
    played.handles[-1].state = state
    await task
    return played.handles[-1]


async def test_a_buffer_is_used_again_after_its_read(agent: NixlAgent, played: PlayedNixl) -> None:
    """3 reads one after the other need 1 buffer."""
    reads = [await ended_read(agent, played) for _ in range(3)]
    assert len({read.buffer for read in reads}) == 1


async def test_a_read_that_was_given_up_keeps_its_buffer_until_it_ends(agent: NixlAgent, played: PlayedNixl) -> None:
    """The next read gets another buffer; once the first has ended, both are free."""
    first = await given_up(agent, played)
    second = await ended_read(agent, played)
    assert second.buffer != first.buffer
    first.state = "DONE"
    await ended_read(agent, played)
    assert played.registered == 2


async def test_nothing_is_read_while_too_many_reads_do_not_end(agent: NixlAgent, played: PlayedNixl) -> None:
    """4 are stuck: the fifth is a fault at once, and no memory is taken for it."""
    stuck = [await given_up(agent, played) for _ in range(STUCK_MAX)]
    with pytest.raises(PeerFault):
        await _read(agent)
    assert played.registered == STUCK_MAX
    stuck[0].state = "ERR"
    await ended_read(agent, played)
    assert played.registered == STUCK_MAX


async def test_what_nixl_says_is_a_fault(agent: NixlAgent, played: PlayedNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that ends badly, an exception of NIXL, a block beyond the arena."""
    with pytest.raises(PeerFault):
        await ended_read(agent, played, "ERR")

    def lost(_: Any) -> str:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    monkeypatch.setattr(played, "transfer", lost)
    with pytest.raises(PeerFault, match="RuntimeError"):
        await _read(agent)
    with pytest.raises(PeerFault):
        async with agent.read(SOURCE, [((1 << 20) - 8, 64)]):
            pass


def test_without_nixl_the_process_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it is told how to get it."""
    monkeypatch.setattr(nixl_agent, "_module", lambda: None)
    with pytest.raises(Unavailable, match="pip install"):
        NixlAgent("nixl-ucx", "near")


async def test_a_read_that_is_given_up_before_it_begins_loses_no_buffer(agent: NixlAgent, played: PlayedNixl) -> None:
    """Cancelled while the agent's thread looks for a buffer for it, 3 times: the next read needs no more than 1."""
    for number in range(3):
        busy, go_on = threading.Event(), threading.Event()

        def register(*_: object, busy=busy, go_on=go_on, **__: object) -> object:  # type: ignore[no-untyped-def]
            busy.set()
            assert go_on.wait(30)
            played.registered += 1
            return object()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(played, "register_memory", register)
            task = asyncio.create_task(_read(agent))
            if number == 0:  # later ones find the buffer of the first one, unless it was lost
                assert await asyncio.to_thread(busy.wait, 30)
            else:
                await asyncio.sleep(0)
            task.cancel()
            go_on.set()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(30):
                while not played.registered:  # noqa: ASYNC110 - the agent's thread goes on after the task has ended
                    await asyncio.sleep(0.01)
    await ended_read(agent, played)
    assert played.registered == 1
