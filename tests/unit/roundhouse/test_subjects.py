"""Ids inside subjects can neither break out of their token nor meet each other."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse import subjects

ids = st.text(min_size=1, max_size=40)


@given(ids)
def test_token_has_only_safe_characters(text: str) -> None:
    """No dot, wildcard, space or control character survives the encoding."""
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", subjects.encode_token(text))


@given(ids, ids)
def test_two_ids_never_share_a_subject(first: str, second: str) -> None:
    """Equal subjects mean equal tenants."""
    assert (subjects.usage(first) == subjects.usage(second)) == (first == second)


def test_empty_id_is_refused() -> None:
    """An empty token would make an invalid subject."""
    with pytest.raises(ValueError, match="must not be empty"):
        subjects.encode_token("")
