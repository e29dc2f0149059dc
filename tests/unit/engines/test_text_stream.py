"""Text leaves in whole characters, stop strings never leave, and a stream says what a single answer says."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engines.reference.text_stream import StopMatcher, TextStream

SAMPLE = "ď🌍你"


def pieces_of(data: bytes, cuts: list[int], stops: list[str], keep: bool = False) -> tuple[list[str], bool]:
    """Push `data` cut at `cuts`; the pieces that were let go, and whether a stop string was found."""
    stream = TextStream(StopMatcher(stops, keep))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    sent: list[str] = []
    for start, stop in pairwise(edges):
        piece = stream.push(data[start:stop])
        sent.append(piece.text)
        if piece.stopped:
            return sent, True
    last = stream.finish()
    return [*sent, last.text], last.stopped


def bytewise(text: str, stops: list[str], cut: int | None = None) -> str:
    """One byte at a time, as the toy model of case B31 speaks."""
    data = text.encode()[:cut]
    return "".join(pieces_of(data, list(range(len(data))), stops)[0])


def test_characters_split_over_tokens_arrive_whole() -> None:
    """Case B31: no replacement character, and the joined pieces are the text."""
    assert bytewise(SAMPLE, []) == SAMPLE


def test_a_stop_string_is_found_across_tokens_and_not_sent() -> None:
    """Case B31 with `stop`: the three bytes of the last character come in three tokens."""
    assert bytewise(SAMPLE, ["你"]) == "ď🌍"


def test_a_cut_inside_a_character_gives_one_replacement_character() -> None:
    """After 2 + 3 bytes the second character lacks its last byte: one U+FFFD, not three."""
    assert bytewise(SAMPLE, [], cut=5) == "ď\ufffd"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    """`EN` might become `END`; `ENX` cannot, so it is let go at once."""
    matcher = StopMatcher(["END"])
    assert [matcher.push(text).text for text in ("abEN", "X", "E")] == ["ab", "ENX", ""]
    assert matcher.flush() == "E"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    """`bc` ends before `abcd` does; of two that end together the longer is cut out."""
    assert pieces_of(b"xabcd", [], ["abcd", "bc"]) == (["xa"], True)
    assert pieces_of(b"xabc", [], ["bc", "abc"]) == (["x"], True)


def test_a_stop_string_can_be_kept() -> None:
    """`include_stop_str_in_output` sends it, but nothing after it."""
    assert pieces_of(b"one END two", [], ["END"], keep=True) == (["one END"], True)


texts = st.text(alphabet="abď🌍你", max_size=30)
stop_lists = st.lists(st.text(alphabet="abď你", min_size=1, max_size=4), max_size=3)


@given(texts, st.lists(st.integers(0, 200), max_size=12), stop_lists)
def test_pieces_join_to_what_one_piece_gives(text: str, cuts: list[int], stops: list[str]) -> None:
    """However the bytes are cut into tokens, the text and the finding of a stop string are the same."""
    data = text.encode()
    pieces, stopped = pieces_of(data, cuts, stops)
    assert ("".join(pieces), stopped) == ("".join(pieces_of(data, [], stops)[0]), pieces_of(data, [], stops)[1])


@given(texts, st.lists(st.integers(0, 200), max_size=12), stop_lists)
def test_no_stop_string_is_ever_sent(text: str, cuts: list[int], stops: list[str]) -> None:
    """Nor is text lost: without a match everything arrives, with one everything before it."""
    pieces, stopped = pieces_of(text.encode(), cuts, stops)
    sent = "".join(pieces)
    assert not any(stop in sent for stop in stops)
    assert text.startswith(sent)
    assert stopped == any(stop in text for stop in stops)
    assert stopped or sent == text


@given(st.binary(max_size=24), st.lists(st.integers(0, 200), max_size=8))
def test_any_bytes_decode_alike_in_pieces_and_at_once(data: bytes, cuts: list[int]) -> None:
    """Also what is no UTF-8 at all."""
    assert "".join(pieces_of(data, cuts, [])[0]) == data.decode("utf-8", "replace")
