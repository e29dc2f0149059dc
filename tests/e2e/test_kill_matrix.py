"""A sample of the kill matrix (`python -m benchmarks killmatrix`): four parts once, each at a step drawn by a seed.

`ROUNDHOUSE_TEST_KILLS=all` kills every part at every step, the database too; that takes minutes."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from benchmarks.kill_books import Tally
from benchmarks.kill_load import STEPS
from benchmarks.killmatrix import PARTS, Arena, Plan, arena_running, matrix
from roundhouse.environment import kill_tests_wanted
from tests.e2e.mesh import Mesh
from tests.infra import postgres_missing

pytestmark = pytest.mark.timeout(600)


def test_streamed_is_recorded_is_billed_whatever_is_killed(mesh: Mesh) -> None:
    """Invariants 13 and 14: kill -9 of gateway, scheduler, bus and metering while requests stream: nothing is lost,
    nothing is double, and what is billed beyond what a client received is at most the piece that its killed gateway was
    handing on. Invariant 18: only a gateway's own kill cuts a stream."""
    step = random.Random(7).choice(STEPS[1:4])
    plan = Plan(12, [part for part in PARTS if part != "database"], [step], seed=7)
    check(asyncio.run(matrix(Arena(mesh, None), plan)))


@pytest.mark.skipif(kill_tests_wanted() != "all", reason="the long run: ROUNDHOUSE_TEST_KILLS=all")
def test_every_part_at_every_step() -> None:
    """The same for each part at each step, on PostgreSQL where there is one."""
    database = postgres_missing() is None
    parts = PARTS if database else PARTS[:-1]
    with arena_running("postgresql" if database else "sqlite") as arena:
        check(asyncio.run(matrix(arena, Plan(100, parts, STEPS, seed=7))))


def check(lines: Sequence[Tally]) -> None:
    """Every line of the matrix."""
    for line in lines:
        assert line.streamed > 0, line
        assert (line.lost, line.double) == (0, 0), line
        assert line.ledger == line.billed == line.streamed + line.in_flight, line
        assert line.part == "gateway" or line.cut == 0, line
