"""Looks for memory that nobody answers for: of Triton's processes, and on GPUs where NVML tells what is in use.

    beside models  =  in use  -  what loaded models hold          growth  =  beside models now  -  at the first look

Looked at only while nothing is being loaded or unloaded. What a GPU holds unaccounted is kept out of the account's free
bytes at once. Growth over the bound is told once (metric, log, audit), and as soon as nothing stands on the node,
Triton is ended, so that its supervisor starts a fresh one; while models stand here it is only told, and a drain of
the node brings the moment. It starts no Triton itself.
"""

import structlog

from roundhouse.errors import Unavailable
from services.loader.device_ports import DeviceInventory, ModelProcesses, ServerMemory
from services.loader.domain.instance import State
from services.loader.operations.node import Node
from services.loader.ports import AuditNote, AuditTrail, Measurements

log = structlog.get_logger(__name__)

LOOK_MS = 5_000  # a look reads the page tables' sums of Triton's processes: milliseconds. A guess.
END_PATIENCE_MS = 15_000  # nothing runs on it; Triton itself gives up after its --exit-timeout-secs
DEVICE_NOISE_BYTES = 256 * 2**20  # on a GPU: contexts and pools that libraries make once and keep. A guess.
SERVER = "server"
_MOVING = (State.LOADING, State.UNLOADING, State.DRAINING)


class LeakWatch:
    """Run `turn` each `LOOK_MS`."""

    def __init__(
        self,
        node: Node,
        processes: ModelProcesses,
        inventory: DeviceInventory,
        audit: AuditTrail,
        measurements: Measurements,
        bound_bytes: int,
    ) -> None:
        self._node = node
        self._processes = processes
        self._inventory = inventory
        self._audit = audit
        self._measurements = measurements
        self._bound = bound_bytes
        self._first: ServerMemory | None = None
        self._told: set[str] = set()
        self._stays = 0
        """The process that could not be ended: it is not tried again."""

    async def turn(self) -> None:
        """Look, tell, and end a Triton that leaks and holds nothing. Raises nothing that is expected."""
        before = self._steps()
        if before is None or self._node.unhealthy_reason:
            return
        server = await self._processes.server([home.triton_name for home in self._node.residences.values()])
        used = await self._inventory.used_bytes()
        if self._steps() != before:
            return  # something moved meanwhile: the numbers do not belong together
        grown: dict[str, int] = {}
        if used is not None:
            grown |= {str(index): self._look_at_device(index, size) for index, size in used.items()}
        if server is not None:
            grown[SERVER] = self._look_at_server(server)
        for where, size in grown.items():
            self._measurements.unaccounted(where, size)
            self._tell(where, size)
        worst = max(grown, key=lambda where: grown[where], default=SERVER)
        if self._told and server is not None and server.pid != self._stays and self._is_empty():
            await self._recycle(server, worst, grown[worst])

    def _steps(self) -> int | None:
        """A number that changes with every step of any version; None while something is on its way."""
        instances = [home.instance for home in self._node.residences.values()]
        return None if any(each.state in _MOVING for each in instances) else sum(each.steps for each in instances)

    def _look_at_server(self, now: ServerMemory) -> int:
        if self._first is None or self._first.pid != now.pid:
            self._first = now
            self._told.clear()
        grown = now.bytes_beside_models - self._first.bytes_beside_models
        return max(0, grown - self._inside())

    def _inside(self) -> int:
        """Bytes of models that run in Triton's own process, as they are reckoned: they are not beside it."""
        inside = (home for home in self._node.residences.values() if not home.had_process)
        return sum(self._node.device.held_by(home.instance.version).resident for home in inside)

    def _look_at_device(self, index: int, used: int) -> int:
        excess = used - self._node.device.models_on(index)
        first = self._node.unowned.setdefault(index, max(0, excess))
        grown = max(0, excess - first)
        counted = grown if grown > DEVICE_NOISE_BYTES else 0
        ledger = self._node.device.found_unaccounted(index, counted)
        if ledger != self._node.device:
            self._node.device = ledger
            self._node.tell()
        return grown

    def _tell(self, where: str, size: int) -> None:
        if not self._bound or size <= self._bound:
            self._told.discard(where)
            return
        if where in self._told:
            return
        self._told.add(where)
        log.error("memory_leaked", where=where, bytes=size)
        self._audit.record(AuditNote("leak", None, "memory that no model answers for", _details(where, size)))

    def _is_empty(self) -> bool:
        return all(home.instance.state.is_at_rest for home in self._node.residences.values())

    async def _recycle(self, server: ServerMemory, where: str, size: int) -> None:
        self._node.recycling = f"its Triton is started anew: {size} bytes leaked"
        self._node.tell()  # nothing new comes from now on; nothing awaited since the look at what stands here
        try:
            await self._processes.end_server(server.pid, END_PATIENCE_MS)
            self._measurements.server_recycled()
            self._audit.record(AuditNote("recycled", None, "its memory leaked", _details(where, size)))
            self._node.set_health("Triton is being started anew")
            self._first = None
            self._told.clear()
            self._node.unowned.clear()
        except Unavailable as error:
            log.error("triton_stays", pid=server.pid, reason=error.message)
            self._stays = server.pid
        finally:
            self._node.recycling = ""
            self._node.tell()


def _details(where: str, size: int) -> dict[str, str]:
    return {"where": where if where == SERVER else f"device {where}", "bytes": str(size)}
