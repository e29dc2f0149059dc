"""What happened to the models of a pool, in small pieces: the past that every replica's forecast is made from.

Replicas share the submits, so each sees a part of the arrivals. Each puts what it saw into one history, about once a
second, and all read the whole of it in one order: their forecasts agree, and a new replica starts with the past. Pure.
"""

from dataclasses import dataclass, field

from services.scheduler.domain.records import VersionKey


@dataclass(frozen=True, slots=True)
class Happened:
    """One version, in the time since the entry before."""

    arrivals: int = 0
    ended: int = 0
    run_ms: int = 0  # of those that ended, together
    wait_ms: int = 0  # from submit to grant, of those that were granted, together
    granted: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What one replica saw until `at_ms`."""

    at_ms: int
    versions: dict[VersionKey, Happened]


@dataclass(slots=True)
class Gathering:
    """What this replica saw and has not told yet. Mutable; bounded by the versions of the catalogue."""

    versions: dict[VersionKey, Happened] = field(default_factory=dict)

    def add(self, version: VersionKey, happened: Happened) -> None:
        """Count more of a version."""
        before = self.versions.get(version, Happened())
        self.versions[version] = Happened(
            before.arrivals + happened.arrivals,
            before.ended + happened.ended,
            before.run_ms + happened.run_ms,
            before.wait_ms + happened.wait_ms,
            before.granted + happened.granted,
        )

    def put_back(self, entry: Entry) -> None:
        """Keep what could not be told, for the next time."""
        for version, happened in entry.versions.items():
            self.add(version, happened)

    def close(self, now_ms: int) -> Entry | None:
        """The next entry; None if nothing happened."""
        if not self.versions:
            return None
        entry = Entry(now_ms, self.versions)
        self.versions = {}
        return entry
