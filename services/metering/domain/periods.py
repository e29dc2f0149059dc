"""Periods of usage: UTC days and hours of an event's own time stamp (invariant 14), months that are billed, and how
instants are written.

Days and hours of UTC are multiples of their length since the Unix epoch, so a period is plain arithmetic, the same in
SQL and here. An accounting period is a month of UTC, named `2026-11` and known by its start in milliseconds.
"""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNIX_MS: Final = re.compile(r"\d{1,14}")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_MONTH: Final = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")
_DAYS_REMEMBERED: Final = 4096  # more than ten years of days


def day_start_ms(time_ms: int) -> int:
    """Start of the UTC day that holds an instant."""
    return time_ms - time_ms % DAY_MS


def hour_start_ms(time_ms: int) -> int:
    """Start of the UTC hour that holds an instant."""
    return time_ms - time_ms % HOUR_MS


def month_start_ms(time_ms: int) -> int:
    """Start of the UTC month that holds an instant: the accounting period of an event. O(1)."""
    return _month_of_day(time_ms // DAY_MS)


@lru_cache(_DAYS_REMEMBERED)
def _month_of_day(day: int) -> int:
    return (day - _instant(day * DAY_MS).day + 1) * DAY_MS


def next_month_ms(month_ms: int) -> int:
    """Start of the month after the one that starts at `month_ms`."""
    return month_start_ms(month_ms + 31 * DAY_MS)


def month_text(month_ms: int) -> str:
    """A month as `2026-01`."""
    return _instant(month_ms).strftime("%Y-%m")


def parse_month(text: str) -> int | None:
    """Start of a month such as `2026-01`; None if the text is none (years from 1970)."""
    match = _MONTH.fullmatch(text)
    if match is None or int(match[1]) < _EPOCH.year:
        return None
    return (datetime(int(match[1]), int(match[2]), 1, tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)


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
