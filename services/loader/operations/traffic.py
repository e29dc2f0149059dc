"""Who of the running copies may move bytes now, told to the threads that move them.

`domain.staging_priority` decides; here the decision becomes an event that each copy's threads wait for between two
chunks. Lanes are entered, promoted and left on the event loop.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from roundhouse.errors import Unavailable
from services.loader.domain.staging_priority import Priority, may_move

LOOK_S = 0.5  # how late a thread that waits sees that its lane was left; leaving also wakes it


class TrafficLane:
    """`Lane` of one version; see `Traffic`."""

    def __init__(self, traffic: "Traffic", priority: Priority) -> None:
        self.priority = priority
        self._traffic = traffic
        self._open = threading.Event()
        self._left = False

    @property
    def is_open(self) -> bool:
        """See `Lane.is_open`."""
        return self._open.is_set() and not self._left

    def wait_in_thread(self) -> None:
        """See `Lane.wait_in_thread`."""
        while not self._open.wait(LOOK_S):
            if self._left:
                break
        if self._left:
            raise Unavailable("nobody waits for these weights any more")

    def promote(self, priority: Priority) -> None:
        """Go on with at least this priority."""
        if priority < self.priority:
            self.priority = priority
            self._traffic.settle()

    def leave(self) -> None:
        """Nobody wants it any more: threads that wait or come are told. Idempotent."""
        self._left = True
        self._open.set()

    def allow(self, may: bool) -> None:
        """For `Traffic`: let the threads go on, or hold them."""
        if may or self._left:
            self._open.set()
        else:
            self._open.clear()


class Traffic:
    """All copies of one node."""

    def __init__(self) -> None:
        self._lanes: list[TrafficLane] = []

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
