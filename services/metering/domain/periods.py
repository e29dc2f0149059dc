"""Periods of usage: UTC days and hours of an event's own time stamp (invariant 14), and how instants are written.

Days and hours of UTC are multiples of their length since the Unix epoch, so a period is plain arithmetic, the same in
SQL and here.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNIX_MS: Final = re.compile(r"\d{1,14}")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")


def day_start_ms(time_ms: int) -> int:
    """Start of the UTC day that holds an instant."""
    return time_ms - time_ms % DAY_MS


def hour_start_ms(time_ms: int) -> int:
    """Start of the UTC hour that holds an instant."""
    return time_ms - time_ms % HOUR_MS


def day_text(start_ms: int) -> str:
    """A day as `2026-01-31`."""
    return _instant(start_ms).strftime("%Y-%m-%d")


def hour_text(start_ms: int) -> str:
    """An hour as `2026-01-31T13:00Z`."""
    return _instant(start_ms).strftime("%Y-%m-%dT%H:00Z")


def instant_text(time_ms: int) -> str:
    """An instant as `2026-01-31T13:05:07.123Z`."""
    return _instant(time_ms).strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_ms % 1000:03d}Z"


def parse_instant(text: str) -> int | None:
    """Milliseconds of a date (its start in UTC), an RFC 3339 instant with offset, or Unix milliseconds.

    None if the text is none of these; an instant without an offset is ambiguous and refused."""
    if _UNIX_MS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if _DATE.fullmatch(text):
        moment = moment.replace(tzinfo=UTC)
    if moment.tzinfo is None:
        return None
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _instant(time_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=time_ms)
