"""Block keys under arbitrary fields: different inputs never share a key, and equal prefixes always do (case B25)."""

from hypothesis import given
from hypothesis import strategies as st

from roundhouse.block_keys import prefix_block_keys, tenant_salt

TEXT_FIELDS = st.binary(max_size=6)
SPACES = st.tuples(TEXT_FIELDS, TEXT_FIELDS, TEXT_FIELDS, st.integers(1, 4))
TOKENS = st.lists(st.integers(0, 3), max_size=16)


@given(SPACES, SPACES, TOKENS, TOKENS)
def test_keys_are_shared_exactly_for_equal_spaces_and_prefixes(
    one: tuple[bytes, bytes, bytes, int], two: tuple[bytes, bytes, bytes, int], left: list[int], right: list[int]
) -> None:
    """Two prompts share as many keys as they share whole blocks in one space, and none across spaces."""
    keys_left, keys_right = prefix_block_keys(*one, left), prefix_block_keys(*two, right)
    shared = 0
    if one == two:
        size = one[3]
        while shared < min(len(keys_left), len(keys_right)):
            if left[: (shared + 1) * size] != right[: (shared + 1) * size]:
                break
            shared += 1
    assert keys_left[:shared] == keys_right[:shared]
    assert not set(keys_left[shared:]) & set(keys_right)


@given(st.binary(min_size=2, max_size=12), st.integers(0, 12), st.integers(0, 12), TOKENS.filter(bool))
def test_moving_a_boundary_between_fields_changes_the_key(
    text: bytes, first: int, second: int, tokens: list[int]
) -> None:
    """B25: the same bytes cut at other places into salt, model and adapter are other keys."""
    cuts = {(min(a, len(text)), min(b, len(text))) for a, b in ((first, second), (second, first)) if a <= b}
    cuts |= {(0, len(text)), (0, 0), (len(text), len(text))}
    keys = {prefix_block_keys(text[:a], text[a:b], text[b:], 1, tokens)[-1] for a, b in cuts}
    assert len(keys) == len(cuts)


@given(st.tuples(st.text(max_size=4), st.text(max_size=4)), st.tuples(st.text(max_size=4), st.text(max_size=4)))
def test_salts_of_different_tenants_differ(one: tuple[str, str], two: tuple[str, str]) -> None:
    """A salt names one cluster and one tenant."""
    assert (tenant_salt(*one) == tenant_salt(*two)) == (one == two)
