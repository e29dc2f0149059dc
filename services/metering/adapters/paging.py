"""Cursors of the query API: the key of the last row, as text that callers hand back unread.

A cursor belongs to the grouping it was made for; with another it is refused.
"""

import base64
import binascii
import json
from typing import Any, Final

from services.metering.domain.queries import BadQuery, Dimension, GroupKey

_REFUSED: Final = BadQuery("cursor", "cursor is not one that this query returned")
_SEQUENCE_MAX: Final = 2**63 - 1
_NUMERIC: Final = (Dimension.DAY, Dimension.HOUR)


def group_cursor(key: GroupKey) -> str:
    """The cursor after a group."""
    return _encode(list(key))


def row_cursor(sequence: int) -> str:
    """The cursor after a row."""
    return _encode(sequence)


def read_group_cursor(text: str, by: tuple[Dimension, ...]) -> GroupKey | BadQuery:
    """The group key in a cursor."""
    value = _decode(text)
    kinds = [int if dimension in _NUMERIC else str for dimension in by] + [str]
    if not isinstance(value, list) or [type(part) for part in value] != kinds:
        return _REFUSED
    return tuple(value)


def read_row_cursor(text: str) -> int | BadQuery:
    """The sequence in a cursor."""
    value = _decode(text)
    return value if type(value) is int and 0 <= value <= _SEQUENCE_MAX else _REFUSED


def _encode(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


def _decode(text: str) -> Any:
    try:
        return json.loads(base64.b64decode(text.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):  # ValueError holds JSON and Unicode errors
        return None
