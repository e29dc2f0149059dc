"""How busy each model is: rates, run times and waits as moving averages over the history. Pure.

Averages halve their memory every `HALF_LIFE_MS`; they are brought to a common time when they are read, so a model that
nobody calls any more fades without being touched.
"""

from dataclasses import dataclass, field

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.history import Entry, Happened
from services.scheduler.domain.warmth.queueing import Traffic

HALF_LIFE_MS = 300_000  # a guess: five minutes follow a working day's changes and smooth a burst
LN2 = 0.6931471805599453
SERVICE_UNSEEN_MS = 1_000.0  # run time of a request of a model that has finished none yet: a guess
FADED = 1e-3  # arrivals left in the average below which a model is forgotten


@dataclass(slots=True)
class Sums:
    """Decayed sums of one version, as of `at_ms`."""

    at_ms: int
    arrivals: float = 0.0
    ended: float = 0.0
    run_ms: float = 0.0
    wait_ms: float = 0.0
    granted: float = 0.0

    def fade(self, now_ms: int) -> None:
        """Bring the sums to a later time."""
        if now_ms <= self.at_ms:
            return
        keep = 0.5 ** ((now_ms - self.at_ms) / HALF_LIFE_MS)
        self.at_ms = now_ms
        self.arrivals *= keep
        self.ended *= keep
        self.run_ms *= keep
        self.wait_ms *= keep
        self.granted *= keep

    def add(self, happened: Happened) -> None:
        """Count what happened at `at_ms`."""
        self.arrivals += happened.arrivals
        self.ended += happened.ended
        self.run_ms += happened.run_ms
        self.wait_ms += happened.wait_ms
        self.granted += happened.granted


@dataclass(slots=True)
class Activity:
    """The models of one pool."""

    versions: dict[VersionKey, Sums] = field(default_factory=dict)

    def observe(self, entry: Entry) -> None:
        """Take an entry of the history in."""
        for version, happened in entry.versions.items():
            sums = self.versions.setdefault(version, Sums(entry.at_ms))
            sums.fade(entry.at_ms)
            sums.add(happened)

    def traffic(self, version: VersionKey, now_ms: int) -> Traffic:
        """What comes to a version now; a rate of 0 for one that nobody calls."""
        sums = self.versions.get(version)
        if sums is None:
            return Traffic(0.0, SERVICE_UNSEEN_MS)
        sums.fade(now_ms)
        service_ms = sums.run_ms / sums.ended if sums.ended > 0 else SERVICE_UNSEEN_MS
        # A steady rate r keeps r × half-life / ln 2 arrivals in the sum.
        return Traffic(sums.arrivals * LN2 / HALF_LIFE_MS, max(1.0, service_ms))

    def wait_ms(self, version: VersionKey, now_ms: int) -> float:
        """Mean wait from submit to grant of late; 0 if there was none."""
        sums = self.versions.get(version)
        if sums is None:
            return 0.0
        sums.fade(now_ms)
        return sums.wait_ms / sums.granted if sums.granted > 0 else 0.0

    def forget(self, now_ms: int) -> None:
        """Drop what has faded, so that old versions do not pile up."""
        for version, sums in list(self.versions.items()):
            sums.fade(now_ms)
            if sums.arrivals < FADED:
                del self.versions[version]
