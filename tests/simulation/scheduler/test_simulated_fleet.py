"""The simulator of `python -m benchmarks simulate` at a small scale: what it asserts holds, and one seed is one run."""

import random

import pytest

from benchmarks.simulated_fleet import Fleet, ModelCost, Request, Speeds
from roundhouse.vocabulary import NodeId, PriorityClass
from services.scheduler.domain.records import version_key
from services.scheduler.domain.service import Policy

MODELS = [
    ModelCost(version_key(f"m{n}", "sha256:1"), 30 + 10 * (n % 3), 20, 2 + n % 3, 100, 5_000, 500, 2_000)
    for n in range(9)
]
SPEEDS = Speeds(source=1, disk=1, host=1, host_bytes=100)


def play(seed: int) -> tuple[Fleet, list[Request]]:
    """600 requests of five tenants for nine models on three nodes that hold two or three each; nodes die."""
    chance = random.Random(seed)
    requests = [
        Request(
            at_ms,
            f"t{chance.randrange(5)}",
            chance.choice(list(PriorityClass)),
            chance.randrange(len(MODELS)),
            chance.randrange(1, 200),
            written := chance.randrange(1, 100),
            written + chance.randrange(50),
            chance.choice([3_000, 20_000, 60_000]),
        )
        for at_ms in sorted(chance.randrange(120_000) for _ in range(600))
    ]
    fleet = Fleet(MODELS, 3, 100, SPEEDS, Policy())
    for _ in range(4):
        fleet.at(chance.randrange(120_000), fleet.kill, NodeId(f"n{chance.randrange(3):04d}"), 8_000)
    fleet.run(iter(requests))
    return fleet, requests


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once(seed: int) -> None:
    """Invariants 1, 6 and 8, through deaths of nodes and more models than fit."""
    fleet, requests = play(seed)
    assert all(each.ended for each in requests)
    assert sum(fleet.counts[how] for how in ("Done", "Expired", "Failed", "TooLate", "QueueFull", "Shed")) == 600
    assert fleet.counts["Done"] > 300
    assert fleet.counts["evictions"] > 0


def test_one_seed_is_one_run() -> None:
    """Nothing depends on hashes, addresses or the real clock."""
    assert play(7)[0].counts == play(7)[0].counts
    assert play(7)[0].counts != play(8)[0].counts
