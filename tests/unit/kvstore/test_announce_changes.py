"""Block events: the net change, in numbered messages, and silence when nobody can hear."""

from roundhouse import subjects
from roundhouse.event_bus import Message
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.domain.records import Changes
from services.kvstore.operations import announce_changes
from services.kvstore.operations.announce_changes import ChangeAnnouncer
from tests.fakes.event_bus import FakeBus


async def announced(*turns: Changes, bus: FakeBus | None = None) -> list[kv_pb2.BlockEvents]:
    """What a scheduler hears of node `n.1`."""
    bus = bus or FakeBus()
    heard: list[kv_pb2.BlockEvents] = []

    async def hear(message: Message) -> None:
        heard.append(kv_pb2.BlockEvents.FromString(message.data))

    subscription = await bus.subscribe(subjects.KV_BLOCKS, hear)
    announcer = ChangeAnnouncer("n.1", "run1")
    for changes in turns:
        await announcer.announce(changes, bus)
    await subscription.stop()
    return heard


async def test_changes_are_sent_with_node_incarnation_and_sequence() -> None:
    """Two turns with changes and one without are two messages."""
    first, second = await announced(Changes((b"a",), ()), Changes((), ()), Changes((b"b",), ()))
    assert (first.node_id, first.incarnation, first.sequence, list(first.stored)) == ("n.1", "run1", 1, [b"a"])
    assert (second.sequence, list(second.stored)) == (2, [b"b"])


async def test_only_the_net_change_is_sent() -> None:
    """a came and went; b went and came back, as before: neither is news. c came, d went."""
    heard = await announced(Changes((b"a", b"b", b"c"), (b"a", b"b", b"d")))
    assert [(list(event.dropped), list(event.stored)) for event in heard] == [([b"d"], []), ([], [b"c"])]


async def test_many_keys_are_cut_into_messages(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """5 keys, 2 a message: 3 messages, numbered 1 to 3."""
    monkeypatch.setattr(announce_changes, "KEYS_A_MESSAGE", 2)
    heard = await announced(Changes(tuple(b"%d" % number for number in range(5)), ()))
    assert [(event.sequence, len(event.stored)) for event in heard] == [(1, 2), (2, 2), (3, 1)]


async def test_what_the_bus_does_not_take_leaves_a_gap() -> None:
    """A message lost while NATS was away is missing from the sequence; nothing is raised."""
    announcer, bus = ChangeAnnouncer("n1", "run1"), FakeBus()
    assert await announcer.announce(Changes((b"a",), ()), None) == 1
    bus.connected = False
    assert await announcer.announce(Changes((b"b",), ()), bus) == 1
    bus.connected = True
    assert await announcer.announce(Changes((b"c",), ()), bus) == 0
    assert announcer._sequence == 3
