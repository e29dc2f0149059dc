"""The block table's counts as Prometheus series, read when scraped. No labels from callers (invariant 17)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.domain.records import TableStatistics
from services.kvstore.operations.disk_parts import DiskCounts
from services.kvstore.operations.fetch_blocks import PeerCounts
from services.kvstore.operations.send_blocks import SendCounts


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the counts come from when somebody scrapes."""

    table: Callable[[], TableStatistics]
    disk: Callable[[], DiskCounts]
    fetched: Callable[[], PeerCounts]
    sent: Callable[[], SendCounts]


class _TableCollector(Collector):
    def __init__(self, counts: Counts, slot_bytes: int) -> None:
        self._counts = counts
        self._slot_bytes = slot_bytes

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_table(self._counts.table())
        yield from self._collect_disk(self._counts.disk())
        yield from self._collect_peers(self._counts.fetched(), self._counts.sent())

    def _collect_table(self, counts: TableStatistics) -> Iterator[Metric]:
        memory = GaugeMetricFamily("roundhouse_kv_arena_bytes", "Arena bytes; free + held = all.", labels=["state"])
        for state, units in (
            ("free", counts.units_free),
            ("held", counts.units_held),
            ("leased", counts.units_leased),
        ):
            memory.add_metric([state], units * self._slot_bytes)
        yield memory
        yield GaugeMetricFamily("roundhouse_kv_blocks", "Blocks that can be found.", value=counts.blocks)
        yield GaugeMetricFamily("roundhouse_kv_leases", "Open leases to read or to write.", value=counts.leases)
        for name, text, value in (
            ("hits", "Blocks asked for and found.", counts.hits),
            ("misses", "Blocks asked for and not found.", counts.misses),
            ("evictions", "Blocks dropped to make room.", counts.evictions),
            ("evictions_awaited", "Of them, those that a writer had to wait for.", counts.evictions_awaited),
            ("corrupt", "Blocks whose bytes did not match their checksum.", counts.corrupt),
            ("leases_expired", "Leases that ended by time.", counts.leases_expired),
        ):
            yield CounterMetricFamily(f"roundhouse_kv_{name}", text, value=value)

    def _collect_disk(self, counts: DiskCounts) -> Iterator[Metric]:
        yield GaugeMetricFamily("roundhouse_kv_disk_bytes", "Bytes of segment files.", value=counts.bytes_held)
        yield GaugeMetricFamily("roundhouse_kv_disk_blocks", "Blocks on disk.", value=counts.blocks)
        for name, text, value in (
            ("written", "Blocks written to disk.", counts.written),
            ("promoted", "Blocks read from disk into memory.", counts.promoted),
            ("dropped", "Blocks dropped from disk to make room.", counts.dropped),
            ("refused", "Blocks not written: queue full, bound of a tenant, parent missing.", counts.refused),
            ("corrupt", "Blocks read from disk with a wrong checksum.", counts.corrupt),
            ("errors", "Faults of the file system.", counts.errors),
        ):
            yield CounterMetricFamily(f"roundhouse_kv_disk_{name}", text, value=value)

    def _collect_peers(self, fetched: PeerCounts, sent: SendCounts) -> Iterator[Metric]:
        yield GaugeMetricFamily("roundhouse_kv_holds", "Chains pinned by a handle.", value=sent.holds)
        yield GaugeMetricFamily("roundhouse_kv_peer_keys", "Known keys of other nodes.", value=fetched.known_keys)
        for name, text, value in (
            ("fetched", "Blocks taken from other nodes.", fetched.fetched),
            ("fetched_bytes", "Bytes taken from other nodes.", fetched.bytes_fetched),
            ("sent", "Blocks given to other nodes.", sent.sent),
            ("corrupt", "Blocks that came with a wrong checksum.", fetched.corrupt),
            ("failures", "Exchanges that failed or came too late.", fetched.failures),
        ):
            yield CounterMetricFamily(f"roundhouse_kv_peer_{name}", text, value=value)


@contextmanager
def table_metrics(registry: CollectorRegistry, counts: Counts, slot_bytes: int) -> Iterator[None]:
    """Serve the counts in `registry` while the context is open."""
    collector = _TableCollector(counts, slot_bytes)
    registry.register(collector)
    try:
        yield
    finally:
        registry.unregister(collector)
