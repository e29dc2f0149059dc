"""Which free instance, or pair of instances, brings a request its first token first.

The expectation is uncached tokens × the measured prefill time of a token, plus what the instance's running requests add
(see `Offer`). Cached prefixes are so worth what they save there, and a busy instance with the prefix loses to an idle
one without it as soon as that is faster. A prompt is handed over when that is less, all waits added up, than running it
where others decode, each of whom would wait for it. Integers only: `adapters/scripts/take.lua` decides the same.

It never waits for a better instance that is full: a slot that is free is used (invariant 3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.domain.records import InstanceKey, Offer, Part, QueueEntry


@dataclass(frozen=True, slots=True)
class Seats:
    """Where a request runs: `main` decodes, and also runs the prompt unless `prefill` does."""

    main: Offer
    prefill: Offer | None = None


def choose_seats(free: Sequence[Offer], in_use: Mapping[InstanceKey, int], entry: QueueEntry) -> Seats:
    """The best of the free offers of the entry's version; at least one of them is no prefill offer. O(offers)."""
    chooser = _Chooser(in_use, entry, dict(entry.warm))
    whole = chooser.best([each for each in free if each.part is not Part.PREFILL], chooser.first_token_us)
    prefill = [each for each in free if each.part is Part.PREFILL]
    decode = [each for each in free if each.part is Part.DECODE]
    if not prefill or not decode:
        return Seats(whole)
    first, then = chooser.best(prefill, chooser.handed_over_us), chooser.best(decode, chooser.crowd_us)
    here_us = chooser.first_token_us(whole) + chooser.in_the_way_us(whole)
    if chooser.handed_over_us(first) + chooser.crowd_us(then) < here_us:
        return Seats(then, first)
    return Seats(whole)


@dataclass(frozen=True, slots=True)
class _Chooser:
    in_use: Mapping[InstanceKey, int]
    entry: QueueEntry
    warm: Mapping[InstanceKey, int]

    def crowd_us(self, offer: Offer) -> int:
        """What the requests that run there add."""
        return self.in_use.get(offer.instance, 0) * offer.load_us // offer.slots

    def first_token_us(self, offer: Offer) -> int:
        """When the first token comes if the whole request runs there."""
        return self._uncached(offer) * offer.token_us + self.crowd_us(offer)

    def in_the_way_us(self, offer: Offer) -> int:
        """What the prompt costs the requests that run there: each waits for it."""
        return self.in_use.get(offer.instance, 0) * self._uncached(offer) * offer.token_us

    def handed_over_us(self, offer: Offer) -> int:
        """When the prompt's blocks are at the decode instance."""
        return self.first_token_us(offer) + offer.handoff_us

    def _uncached(self, offer: Offer) -> int:
        return max(0, self.entry.input_tokens - self.warm.get(offer.instance, 0))

    def best(self, offers: Sequence[Offer], us: Callable[[Offer], int]) -> Offer:
        """Least time; of equals the one with the smaller share of its slots in use; then the first."""
        best = offers[0]
        for offer in offers[1:]:
            time, least = us(offer), us(best)
            emptier = self.in_use.get(offer.instance, 0) * best.slots < self.in_use.get(best.instance, 0) * offer.slots
            if time < least or (time == least and emptier):
                best = offer
        return best
