"""Who leaves to make room, with the arithmetic shown."""

import pytest

from services.loader.domain.backoff import retry_delay_ms
from services.loader.domain.room import Leaving, NotEnough, Offered, choose_leaving


@pytest.mark.parametrize(
    ("needed", "sizes", "expected"),
    [
        (0, [100, 100], Leaving(())),
        (-50, [100], Leaving(())),
        (100, [100, 100], Leaving((0,))),
        (101, [100, 100, 100], Leaving((0, 1))),
        (100, [10, 100], Leaving((1,))),  # 10 is not needed once 100 goes
        (105, [10, 100], Leaving((0, 1))),
        (60, [30, 20, 40], Leaving((0, 2))),  # 30 + 40 ≥ 60, so 20 stays
        (301, [100, 100, 100], NotEnough(1)),
        (1, [], NotEnough(1)),
    ],
)
def test_only_as_many_as_needed_in_order(needed: int, sizes: list[int], expected: "Leaving[int] | NotEnough") -> None:
    """B22: all or nothing, and nobody who could stay."""
    assert choose_leaving({0: needed}, [Offered(index, {0: size}) for index, size in enumerate(sizes)]) == expected


def test_the_pause_doubles_up_to_a_minute() -> None:
    """1, 2, 4, … 60 s."""
    assert [retry_delay_ms(n) for n in (1, 2, 3, 6, 7, 8, 10_000)] == [1000, 2000, 4000, 32000, 60000, 60000, 60000]
