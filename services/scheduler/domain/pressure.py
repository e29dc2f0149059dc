"""When a model wants more memory than it has, or wants it back too soon: two facts that placement asks for. Pure.

A backlog that takes longer than the model's promise wants another instance, and not before (`breaks_promise`). A model
that is wanted again soon after it was evicted is one of more models than fit (`came_back`): evicting somebody else at
once for it would only send the next one into the same circle, in which with four models in room for three and turns by
the clock no request ever finds its model (the pattern that is worst for "least recently used"). It waits instead until
something has had its quantum, as under rotation, and the others are hit meanwhile.
"""

from dataclasses import dataclass

from services.scheduler.domain.nodes import Residence
from services.scheduler.domain.plans import PoolView
from services.scheduler.domain.records import PoolState, VersionKey, base_of

EMPTY_STATE = PoolState(0, (), {}, {}, {}, {}, {})


def backlog_ms(view: PoolView, version: VersionKey) -> int:
    """How long what waits for a version takes on its ready instances, at the pace measured; 0 if nothing is known."""
    depths = [depth for depth in view.state.depths if depth.version == version]
    found = (node.find(version) for node in view.holders(version) if node.healthy)
    slots = sum(each.slots for each in found if each is not None and each.residence is Residence.READY)
    if not depths or not slots:
        return 0
    return sum(depth.waiting for depth in depths) * depths[0].run_ms // slots


def breaks_promise(view: PoolView, version: VersionKey) -> bool:
    """Whether the last of those who wait would start later than the model promises."""
    spec = view.specs.get(version)
    return spec is not None and 0 < spec.start_slo_ms < backlog_ms(view, version)


@dataclass(slots=True)
class LastUses:
    """When each version was last in use anywhere, also where it is no more. Looked up once a plan, when first asked."""

    state: PoolState = EMPTY_STATE
    _found: dict[VersionKey, int] | None = None

    def came_back(self, version: VersionKey, wanted_ms: int, within_ms: int) -> bool:
        """Whether a version that is nowhere was in use less than `within_ms` before it was wanted again."""
        if self._found is None:
            self._found = self._look()
        used_ms = self._found.get(base_of(version))
        return used_ms is not None and wanted_ms - used_ms < within_ms

    def _look(self) -> dict[VersionKey, int]:
        found: dict[VersionKey, int] = {}
        for key, used_ms in self.state.used_ms.items():
            length, _, rest = key.partition(":")
            version = VersionKey(rest[int(length) + 1 :])
            found[version] = max(used_ms, found.get(version, 0))
        return found
