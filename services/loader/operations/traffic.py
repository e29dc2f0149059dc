"""Who of the running copies may move bytes now, told to the threads that move them.

`domain.staging_priority` decides; here the decision becomes an event that each copy's threads wait for between two
chunks, and the rate of what no request waits for a pause before a chunk. Lanes are entered, promoted and left on the
event loop.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from roundhouse.errors import Unavailable
from services.loader.domain.staging_priority import Pace, Priority, has_rate, may_move

LOOK_S = 0.5  # how late a thread that waits sees that its lane was left; leaving also wakes it


class TrafficLane:
    """`Lane` of one version; see `Traffic`."""

    def __init__(self, traffic: "Traffic", priority: Priority) -> None:
        self.priority = priority
        self.was_paced = False
        """Whether the rate ever held it up: then its speed says nothing of disk and line."""
        self._traffic = traffic
        self._open = threading.Event()
        self._hurry = threading.Event()
        self._pausing = 0
        self._counting = threading.Lock()
        self._left = False

    @property
    def is_open(self) -> bool:
        """See `Lane.is_open`."""
        return self._open.is_set() and not self._left and not self._pausing

    def wait_in_thread(self, size: int = 0) -> None:
        """See `Lane.wait_in_thread`."""
        self._wait_for_turn()
        if size and has_rate(self.priority) and not self._left:
            self._pause(self._traffic.begins_s(size))
            self._wait_for_turn()  # a request may have come meanwhile
        if self._left:
            raise Unavailable("nobody waits for these weights any more")

    def promote(self, priority: Priority) -> None:
        """Go on with at least this priority."""
        if priority < self.priority:
            self.priority = priority
            if not has_rate(priority):
                self._hurry.set()
            self._traffic.settle()

    def leave(self) -> None:
        """Nobody wants it any more: threads that wait or come are told. Idempotent."""
        self._left = True
        self._open.set()
        self._hurry.set()

    def allow(self, may: bool) -> None:
        """For `Traffic`: let the threads go on, or hold them."""
        if may or self._left:
            self._open.set()
        else:
            self._open.clear()

    def _wait_for_turn(self) -> None:
        while not self._open.wait(LOOK_S):
            if self._left:
                break

    def _pause(self, until_s: float) -> None:
        """Until then, or until somebody waits for it."""
        left_s = until_s - self._traffic.now_s()
        if left_s <= 0:
            return
        self.was_paced = True
        with self._counting:
            self._pausing += 1
        self._hurry.wait(left_s)
        with self._counting:
            self._pausing -= 1


class Traffic:
    """All copies of one node. `bytes_per_s` holds for all together that no request waits for; 0 = no limit."""

    def __init__(self, bytes_per_s: int = 0, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._lanes: list[TrafficLane] = []
        self._pace = Pace(bytes_per_s)
        self._pacing = threading.Lock()

    @contextmanager
    def lane(self, priority: Priority) -> Iterator[TrafficLane]:
        """A lane for as long as the context lasts."""
        lane = TrafficLane(self, priority)
        self._lanes.append(lane)
        self.settle()
        try:
            yield lane
        finally:
            self._lanes.remove(lane)
            lane.leave()
            self.settle()

    def settle(self) -> None:
        """Decide anew for every lane."""
        moving = [lane.priority for lane in self._lanes]
        for lane in self._lanes:
            lane.allow(may_move(lane.priority, moving))

    def begins_s(self, size: int) -> float:
        """When the next chunk of so many bytes may begin, at the rate. Takes its place; thread-safe."""
        with self._pacing:
            self._pace, begins_s = self._pace.take(size, self.now_s())
            return begins_s
