"""From tokens to text that may be sent: whole characters only, and nothing that may yet become a stop string.

Bytes are decoded as one stream, never token by token: a character can be spread over several tokens. What is cut off
inside a character at the end becomes one U+FFFD, in a stream as in a single answer, since both take this path.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that may be sent now; `stopped` when a stop string was found right after it."""

    text: str
    stopped: bool = False


class StopMatcher:
    """Finds the first of several stop strings in a stream of text, whatever the borders of its pieces."""

    def __init__(self, stops: Sequence[str], keep_stop: bool = False) -> None:
        """`keep_stop` sends the stop string too."""
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._keep_stop = keep_stop
        self._held = ""

    def push(self, text: str) -> TextPiece:
        """Take more text; gives what cannot be part of a stop string. Not to be called after `stopped`."""
        if not self._stops:
            return TextPiece(text)
        self._held += text
        found = self._first_match()
        if found is not None:
            start, stop = found
            sent = self._held[: start + len(stop)] if self._keep_stop else self._held[:start]
            self._held = ""
            return TextPiece(sent, stopped=True)
        keep = self._possible_beginning()
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return TextPiece(sent)

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, str] | None:
        """The match that is complete first as text arrives; the longer one of two that end together."""
        found = [(self._held.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Incremental text of one request."""

    def __init__(self, matcher: StopMatcher) -> None:
        """The matcher decides what is held back."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = matcher

    def push(self, data: bytes, matching: bool = True) -> TextPiece:
        """Take the bytes of one token; with `matching` False (below `min_tokens`) stop strings are let through."""
        text = self._decoder.decode(data)
        if not matching:
            return TextPiece(self._matcher.flush() + text)
        return self._matcher.push(text)

    def finish(self) -> TextPiece:
        """The rest: an incomplete character becomes one U+FFFD, held text is let go unless it ends in a stop string."""
        piece = self._matcher.push(self._decoder.decode(b"", final=True))
        return piece if piece.stopped else TextPiece(piece.text + self._matcher.flush())
