"""The figures of the noisy-neighbour scenario that promises rest on: the production queue on seeded arrivals."""

import pytest

from benchmarks.fairness import QUIET, arrivals, token_share
from benchmarks.simulation_worker import Discipline, Fair, Fifo, quantile, serve
from services.scheduler.domain.service import Policy


def p99s(discipline: Discipline) -> list[int]:
    served = serve(arrivals(), discipline)
    assert len(served) == len(arrivals())
    return [quantile([each.wait_ms for each in served if each.arrival.tenant == name], 0.99) for name in QUIET]


def test_the_arrivals_are_those_of_the_literature() -> None:
    """A textbook FIFO simulation of them gives 3,507 and 3,530 ms."""
    assert p99s(Fifo()) == [3_507, 3_530]


@pytest.mark.parametrize("credit", [0, 2, 4])
def test_quiet_tenants_barely_notice_a_noisy_one(credit: int) -> None:
    """With any credit a quiet tenant's p99 wait stays below 70 ms: seven requests of 10 ms."""
    assert max(p99s(Fair(Policy(credit_requests=credit)))) <= 70


def test_token_shares_are_equal_although_requests_cost_ten_to_one() -> None:
    """Two always backlogged tenants: each gets half of the tokens, within 10 %."""
    assert abs(token_share(10) - 0.5) <= 0.05
