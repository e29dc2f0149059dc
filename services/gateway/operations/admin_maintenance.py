"""Takes nodes out of service and back, because an operator says so; the loader remembers it over restarts."""

from roundhouse.errors import NotFound
from roundhouse.vocabulary import KeyId
from services.gateway.operations.admin_ports import AuditTrail, NodeMaintenance, NodeStates


class MaintenanceOperations:
    """What operators do with nodes."""

    def __init__(self, nodes: NodeStates, maintenance: NodeMaintenance, audit: AuditTrail) -> None:
        self._nodes = nodes
        self._maintenance = maintenance
        self._audit = audit

    async def drain(self, node_id: str, reason: str, *, actor: KeyId) -> None:
        """Begin: no new work, then everything is unloaded. Idempotent. Raises NotFound, Unavailable."""
        address = await self._address(node_id)
        await self._maintenance.drain(address, reason)
        await self._audit.record("node.drain", actor=actor, subject=node_id, reason=reason)

    async def resume(self, node_id: str, *, actor: KeyId) -> None:
        """The node takes work again. Idempotent. Raises NotFound, Unavailable."""
        address = await self._address(node_id)
        await self._maintenance.resume(address)
        await self._audit.record("node.resume", actor=actor, subject=node_id)

    async def _address(self, node_id: str) -> str:
        for state in await self._nodes.all():
            if state.node_id == node_id:
                return state.loader_address
        raise NotFound(f"there is no node `{node_id}`, or it is not alive", code="node_not_found", param="node")
