"""How long a version that failed to load is left alone.

Short at first, because most causes are mended by a person who tries again at once; bounded, because a mended model must
not stay away for long. ModelMesh remembers a failure for 15 minutes after 3 tries; here a request in the queue waits
for it, so the longest pause is one minute (a guess between one cold start and one patience).
"""

FIRST_RETRY_MS = 1_000
LONGEST_RETRY_MS = 60_000


def retry_delay_ms(failures: int) -> int:
    """Pause after the n-th failure in a row, n ≥ 1: 1, 2, 4, … seconds, at most 60."""
    assert failures >= 1
    return min(LONGEST_RETRY_MS, FIRST_RETRY_MS << min(failures - 1, 16))
