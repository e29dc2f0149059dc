"""Keeps the hourly sums close behind the ledger, so that queries stay cheap. Answers do not depend on how far it is."""

from typing import Final

from services.metering.ports import Ledger

FOLD_EVERY_MS: Final = 1_000
FOLD_LEAST_ROWS: Final = 4_096  # what a query may add up row by row: a few milliseconds
TURNS_UNTIL_ALL: Final = 10  # then even a few rows are folded, for a quiet ledger


class Folding:
    """A turn for `Lifecycle.every`. Several processes may take turns at once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turns = 0

    async def turn(self) -> None:
        """Fold what waits, if it is much or has waited for long. Raises Unavailable."""
        self._turns += 1
        least = 1 if self._turns % TURNS_UNTIL_ALL == 0 else FOLD_LEAST_ROWS
        while await self._ledger.fold(least=least):
            pass
