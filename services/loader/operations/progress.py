"""How far a load is, and how long it will still take: by its own speed, else by what this node's loads took lately."""

from dataclasses import dataclass

from roundhouse.clock import Clock
from roundhouse.vocabulary import Digest
from services.loader.domain.instance import State
from services.loader.domain.rates import Way
from services.loader.domain.staging_priority import Priority
from services.loader.operations.node import Node, Residence
from services.loader.operations.staging import Stagings


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is. The last one a caller gets is READY (or STAGED, if that is what was ordered)."""

    state: State
    bytes_done: int
    bytes_total: int
    remaining_ms: int | None = None  # None = not known


class ProgressGauge:
    """Reads progress off the node. Changes nothing but priorities."""

    def __init__(self, node: Node, stagings: Stagings, clock: Clock) -> None:
        self._node = node
        self._stagings = stagings
        self._clock = clock

    def promote(self, digest: Digest, priority: Priority) -> None:
        """Somebody with this priority waits for the version too."""
        staging = self._stagings.find(digest)
        if staging is not None:
            staging.promote(priority)

    def moving(self) -> tuple[int, int]:
        """(done, in all) bytes of everything that is being staged."""
        return self._stagings.moving()

    def read(self, home: Residence) -> Progress:
        """Of one version, now."""
        state, size = home.instance.state, home.weights_bytes
        match state:
            case State.ADMITTING:
                return Progress(state, 0, size, self._load_ms(home))
            case State.STAGING:
                return self._staging(home)
            case State.LOADING:
                elapsed_ms = self._clock.now_ms() - home.instance.since_ms
                usual_ms = self._load_ms(home)
                return Progress(state, size, size, None if usual_ms is None else max(1, usual_ms - elapsed_ms))
            case State.READY:
                return Progress(state, size, size, 0)
            case _:
                return Progress(state, 0, size)

    def staging(self, digest: Digest, size: int) -> Progress:
        """Of weights that are only staged."""
        going_on = self._stagings.find(digest)
        if going_on is None or not going_on.bytes_total:
            done = size if self._node.disk.is_whole(digest) else 0
            return Progress(State.STAGING, done, size, self._ahead_ms(digest, size))
        left_ms = going_on.remaining_ms(self._node.rates, self._clock.monotonic_ms())
        return Progress(State.STAGING, going_on.bytes_done, going_on.bytes_total, left_ms)

    def _staging(self, home: Residence) -> Progress:
        staged = self.staging(home.instance.version.digest, home.weights_bytes)
        load_ms = self._load_ms(home)
        if staged.remaining_ms is None or load_ms is None:
            return staged
        return Progress(staged.state, staged.bytes_done, staged.bytes_total, staged.remaining_ms + load_ms)

    def _ahead_ms(self, digest: Digest, size: int) -> int | None:
        """The ways of a staging that has not begun to move, by what they usually take."""
        ways = [] if self._node.disk.is_whole(digest) else [Way.TO_DISK]
        if self._node.host.ledger.capacity and not self._node.host.ledger.is_whole(digest):
            ways.append(Way.TO_HOST)
        usual = [self._node.rates.remaining_ms(way, size) for way in ways]
        known = [each for each in usual if each is not None]
        return sum(known) if len(known) == len(usual) else None

    def _load_ms(self, home: Residence) -> int | None:
        """What Triton will take: as long as the last time, else as long as so many bytes took others."""
        return home.instance.load_ms or self._node.rates.remaining_ms(Way.TO_DEVICE, home.weights_bytes)
