"""The directory of other nodes: who has what, and when it must ask again."""

import pytest

from services.kvstore.domain import peer_directory
from services.kvstore.domain.peer_directory import PeerDirectory

KEYS = [bytes([number]) * 32 for number in range(6)]


def directory_of(*nodes: str) -> PeerDirectory:
    """Nodes that were seen and of which a snapshot at sequence 0 has come."""
    directory = PeerDirectory("own")
    for node in nodes:
        directory.node_seen(node, f"{node}:1", 0)
        directory.snapshot(node, "run1", 0, [])
    return directory


def test_the_longest_run_is_asked_first() -> None:
    """a has 2 of the run and b has 3: b, a. c has the second block only, which is no run."""
    directory = directory_of("a", "b", "c")
    directory.heard("a", "run1", 1, KEYS[:2], [])
    directory.heard("b", "run1", 1, KEYS[:3], [])
    directory.heard("c", "run1", 1, KEYS[1:2], [])
    assert directory.holders(KEYS) == ["b:1", "a:1"]
    assert directory.lost() == []


def test_what_was_dropped_is_not_asked_for() -> None:
    """a had 2 blocks and dropped the first."""
    directory = directory_of("a")
    directory.heard("a", "run1", 1, KEYS[:2], [])
    directory.heard("a", "run1", 2, [], KEYS[:1])
    assert directory.holders(KEYS) == []


def test_a_new_node_a_gap_and_a_new_process_need_a_snapshot() -> None:
    """Each is lost until its snapshot has come, and what is known stays in use after a gap."""
    directory = PeerDirectory("own")
    directory.node_seen("a", "a:1", 0)
    assert directory.lost() == [("a", "a:1")]
    directory.snapshot("a", "run1", 4, KEYS[:1])
    assert directory.lost() == []
    directory.heard("a", "run1", 6, KEYS[2:3], [])  # 5 was lost
    assert (directory.lost(), directory.holders(KEYS)) == ([("a", "a:1")], ["a:1"])
    directory.snapshot("a", "run1", 6, KEYS[:3])
    directory.heard("a", "run2", 1, KEYS[3:4], [])
    assert (directory.lost(), directory.holders(KEYS)) == ([("a", "a:1")], [])


def test_a_repeated_sequence_tells_of_a_lost_last_message() -> None:
    """3 is repeated: nothing is lost if 3 was heard, and something is if only 2 was."""
    directory = directory_of("a", "b")
    for sequence in (1, 2, 3):
        directory.heard("a", "run1", sequence, [KEYS[sequence]], [])
    directory.heard("b", "run1", 1, KEYS[:1], [])
    for node in ("a", "b"):
        directory.heard(node, "run1", 3, [], [])
    assert directory.lost() == [("b", "b:1")]


def test_events_older_than_the_snapshot_change_nothing() -> None:
    """The snapshot at 5 has no KEYS[0]; event 4, which arrives late, had stored it."""
    directory = directory_of("a")
    directory.snapshot("a", "run1", 5, KEYS[1:2])
    directory.heard("a", "run1", 4, KEYS[:1], [])
    assert directory.holders(KEYS[:1]) == []


def test_a_snapshot_older_than_the_events_is_not_used() -> None:
    """Events up to 3 were heard while a snapshot at 2 was on its way: another one is asked for."""
    directory = directory_of("a")
    directory.heard("a", "run1", 3, KEYS[:1], [])
    directory.snapshot("a", "run1", 2, [])
    assert directory.lost() == [("a", "a:1")]


def test_silent_nodes_and_this_one_are_not_asked() -> None:
    """a was last seen at 0 and b at 20 s; what was not seen for 15 s is forgotten. The own node is never there."""
    directory = directory_of("a", "b")
    directory.node_seen("own", "own:1", 20_000)
    directory.node_seen("b", "b:1", 20_000)
    for node in ("a", "b", "own"):
        directory.heard(node, "run1", 1, KEYS[:1], [])
    directory.forget_silent(5_000)
    assert directory.holders(KEYS) == ["b:1"]


def test_a_node_without_a_kvstore_is_nobody() -> None:
    """It had one, and says now that it has none."""
    directory = directory_of("a")
    directory.heard("a", "run1", 1, KEYS[:1], [])
    directory.node_seen("a", "", 1)
    assert (directory.holders(KEYS), directory.keys_known()) == ([], 0)


def test_a_node_with_more_blocks_than_are_kept_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 keys in a snapshot the first 4 are kept, and no later ones."""
    monkeypatch.setattr(peer_directory, "KEYS_A_NODE_MAX", 4)
    directory = PeerDirectory("own")
    directory.node_seen("n1", "address", 0)
    directory.snapshot("n1", "run", 1, [b"%08d" % number for number in range(10)])
    directory.heard("n1", "run", 2, [b"%08d" % number for number in range(10, 20)], [])
    assert directory.keys_known() == 4
