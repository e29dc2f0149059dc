"""Who used which block when, also of blocks that are gone: what the forecast learns from.

A lookup uses the blocks that it finds, and those that it would have found had they not been dropped: without these
nothing longer than the arena's own memory would ever be learned. Of a dropped block a few numbers are kept, of at most
`GONE_SHARE` times as many as are here. A session's think time is the smoothed gap between uses of its deepest block;
its new blocks take it over. A block that is not known was brought with all others that its
lookup missed, and so were those stored below it. Several lookups of one request are one use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.domain.records import Block
from services.kvstore.domain.reuse_forecast import ReuseForecast, bin_of, kind_of, kind_of_new

ONE_USE_MS = 1_000  # an engine asks for memory first, and again when it has decided to wait for slower tiers
GONE_SHARE = 4  # guess: sees gaps of some lifetimes of the arena
GONE_MIN = 65_536  # 15 MB: a small arena has to learn gaps of minutes all the same
GONE_MAX = 262_144
AWAITED_MAX = 4_096  # guess: prompts that are computed at the same time, and what was looked up and never stored
LOOKUPS_FIRST, LOOKUPS_BETWEEN = 20, 200  # after so many it is learned; the first time as soon as there is something
LEARN_MS = 5_000  # between two times, so that learning takes 0.1 % of the time


@dataclass(slots=True, eq=False)
class GoneBlock:
    """What is kept of a dropped block."""

    salt: bytes
    uses: int
    used_ms: int
    think_ms: int
    kind: int


class UseHistory:
    """The uses of one table's blocks. Times in ms."""

    def __init__(self) -> None:
        """Nothing has been used."""
        self.forecast = ReuseForecast()
        self._gone: dict[bytes, GoneBlock] = {}  # the longest gone first
        self._awaited: dict[bytes, int] = {}  # by the first that is not known, how many were missing; oldest first
        self._lookups = self._learned_lookups = 0
        self._learned_ms = 0

    def looked_up(self, found: Sequence[Block], missing: Sequence[bytes], now_ms: int) -> None:
        """A chain was asked for: `found` is here, `missing` follows. O(found + what is remembered of `missing`)."""
        chain: list[Block | GoneBlock] = list(found)
        for key in missing:
            gone = self._gone.get(key)
            if gone is None:
                break
            chain.append(gone)
        if chain:
            self._use(chain, now_ms)
        if len(chain) < len(found) + len(missing):
            self._await(missing[len(chain) - len(found)], len(missing))
        self._lookups += 1
        new = self._lookups - self._learned_lookups
        if new >= min(LOOKUPS_BETWEEN, max(LOOKUPS_FIRST, self._learned_lookups)) and (
            self._lookups <= LOOKUPS_BETWEEN or now_ms - self._learned_ms >= LEARN_MS
        ):
            self._learned_lookups, self._learned_ms = self._lookups, now_ms
            self.forecast.learn()

    def stored(self, block: Block, parent: Block | None, now_ms: int) -> None:
        """A block became visible."""
        gone = self._gone.pop(block.key, None)
        block.used_ms = now_ms
        if gone is not None and gone.salt == block.salt:
            block.uses, block.think_ms, block.kind = gone.uses, gone.think_ms, gone.kind
        else:
            block.think_ms = parent.think_ms if parent is not None else 0
            block.kind = self._kind_of_new(block.key, parent)
        if gone is None or now_ms - gone.used_ms >= ONE_USE_MS:
            self.forecast.began(block.kind)

    def dropped(self, block: Block, blocks_left: int) -> None:
        """A visible block went."""
        self._gone[block.key] = GoneBlock(block.salt, block.uses, block.used_ms, block.think_ms, block.kind)
        room = min(GONE_MAX, max(GONE_MIN, GONE_SHARE * blocks_left))
        while len(self._gone) > room:
            del self._gone[next(iter(self._gone))]

    def forget(self, salt: bytes) -> None:
        """Keep nothing of a salt. O(dropped blocks that are remembered)."""
        self._gone = {key: gone for key, gone in self._gone.items() if gone.salt != salt}
        self._awaited.clear()  # of others too: what they are storing now counts as not known

    def _await(self, first: bytes, missing: int) -> None:
        self._awaited.pop(first, None)
        self._awaited[first] = missing
        if len(self._awaited) > AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]

    def _kind_of_new(self, key: bytes, parent: Block | None) -> int:
        brought = self._awaited.pop(key, 0)
        if not brought and parent is not None and not parent.uses:
            return parent.kind
        return kind_of_new(brought)

    def _use(self, chain: Sequence[Block | GoneBlock], now_ms: int) -> None:
        deepest = chain[-1]
        think_ms, since = deepest.think_ms, now_ms - deepest.used_ms
        if since >= ONE_USE_MS:
            think_ms = (think_ms + since) // 2 if think_ms else since
        used_ms = uses = kind = new_uses = new_kind = -1  # of the run of blocks with the same past: nearly always all
        age_bin = alike = 0
        again = False
        for block in chain:
            if block.used_ms != used_ms or block.uses != uses or block.kind != kind:
                self._count(kind, age_bin, new_kind, alike)
                used_ms, uses, kind, alike = block.used_ms, block.uses, block.kind, 0
                again = now_ms - used_ms >= ONE_USE_MS
                age_bin, new_uses, new_kind = bin_of(now_ms - used_ms), uses + 1, kind_of(uses + 1, think_ms)
            if again:
                alike += 1
                block.uses, block.think_ms, block.kind = new_uses, think_ms, new_kind
            block.used_ms = now_ms
        self._count(kind, age_bin, new_kind, alike)

    def _count(self, kind: int, age_bin: int, new_kind: int, blocks: int) -> None:
        if blocks:
            self.forecast.came_back(kind, age_bin, blocks)
            self.forecast.began(new_kind, blocks)
