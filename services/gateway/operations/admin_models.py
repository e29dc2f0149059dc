"""Loads and unloads models because an operator says so; the scheduler keeps deciding about everything else.

A command carries no generation: the loader counts it as newer than all it has seen, and the scheduler's next command
is newer again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roundhouse.catalogue.records import Model
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import InvalidInput, NotFound, Unavailable
from roundhouse.vocabulary import KeyId, ModelName, NodeId
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.gateway.operations.admin_ports import AuditTrail, LoadCommand, NodeLoader, NodeStates

_STAGE_TARGETS = {"host": vocabulary_pb2.TIER_HOST, "disk": vocabulary_pb2.TIER_DISK}
DEADLINE_MS = 120_000  # twice the default cold-start promise


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where an operator's command took effect, and whether it had to do anything."""

    node_id: NodeId
    changed: bool


class ModelOperations:
    """What operators do with models by hand."""

    def __init__(self, catalogue: CatalogueView, nodes: NodeStates, loader: NodeLoader, audit: AuditTrail) -> None:
        self._catalogue = catalogue
        self._nodes = nodes
        self._loader = loader
        self._audit = audit

    async def load(self, name: str, node_id: str | None, *, actor: KeyId) -> ModelPlace:
        """Make a model ready on a node, or on the best one. Idempotent.

        Raises NotFound, Unavailable (no node takes it), CapacityExhausted, InvalidInput (never fits), DeadlinePassed.
        A cancelled call leaves the load running."""
        model = self._model(name)
        states = await self._nodes.all()
        node = _named(states, node_id) if node_id else _best(states, model)
        if _holds(node, model, vocabulary_pb2.INSTANCE_STATE_READY):
            return ModelPlace(NodeId(node.node_id), changed=False)
        await self._loader.load(_command(node, model), timeout_ms=DEADLINE_MS)
        await self._audit.record("model.load", actor=actor, subject=name, details={"node": node.node_id})
        return ModelPlace(NodeId(node.node_id), changed=True)

    async def stage(self, name: str, node_id: str | None, tier: str, *, actor: KeyId) -> ModelPlace:
        """Bring a model's weights to the `host` or `disk` tier of a node, or of the best one. Idempotent.

        Raises as `load`, and InvalidInput for another tier."""
        target = _STAGE_TARGETS.get(tier)
        if target is None:
            raise InvalidInput("must be host or disk", param="tier")
        model = self._model(name)
        states = await self._nodes.all()
        node = _named(states, node_id) if node_id else _best(states, model)
        await self._loader.load(_command(node, model, target), timeout_ms=DEADLINE_MS)
        details = {"node": node.node_id, "tier": tier}
        await self._audit.record("model.stage", actor=actor, subject=name, details=details)
        return ModelPlace(NodeId(node.node_id), changed=True)

    async def unload(self, name: str, node_id: str | None, *, actor: KeyId) -> list[ModelPlace]:
        """Drain a model and take it off a node, or off all that have it. Idempotent. Raises as `load` does."""
        model = self._model(name)
        states = await self._nodes.all()
        chosen = [_named(states, node_id)] if node_id else [state for state in states if _holds(state, model)]
        places = []
        for node in chosen:
            was_loaded = await self._loader.unload(_command(node, model), timeout_ms=DEADLINE_MS)
            await self._audit.record("model.unload", actor=actor, subject=name, details={"node": node.node_id})
            places.append(ModelPlace(NodeId(node.node_id), changed=was_loaded))
        return places

    def _model(self, name: str) -> Model:
        model = self._catalogue.current.models.get(ModelName(name))
        if model is None:
            raise NotFound(f"there is no model `{name}`", code="model_not_found")
        return model


def _named(states: Sequence[loading_pb2.NodeState], node_id: str) -> loading_pb2.NodeState:
    for state in states:
        if state.node_id == node_id:
            return state
    raise NotFound(f"there is no node `{node_id}`, or it is not alive", code="node_not_found", param="node")


def _best(states: Sequence[loading_pb2.NodeState], model: Model) -> loading_pb2.NodeState:
    """The node that has it; else of those that take work the one with the most free device memory."""
    usable = [state for state in states if state.accepting and state.pool == model.pool]
    if not usable:
        raise Unavailable(f"no node of the pool `{model.pool}` takes work now")
    ready = vocabulary_pb2.INSTANCE_STATE_READY
    return max(usable, key=lambda state: (_holds(state, model, ready), _free_bytes(state), state.node_id))


def _holds(
    state: loading_pb2.NodeState, model: Model, wanted: vocabulary_pb2.InstanceState.ValueType | None = None
) -> bool:
    return any(
        instance.version.model == model.name
        and instance.version.digest == model.digest
        and (wanted is None or instance.state == wanted)
        for instance in state.instances
    )


def _free_bytes(state: loading_pb2.NodeState) -> int:
    devices = [tier for tier in state.tiers if tier.tier == vocabulary_pb2.TIER_DEVICE]
    return sum(tier.capacity - tier.resident - tier.reserved for tier in devices)


def _command(
    node: loading_pb2.NodeState,
    model: Model,
    target: "vocabulary_pb2.Tier.ValueType" = vocabulary_pb2.TIER_DEVICE,
) -> LoadCommand:
    return LoadCommand(node.loader_address, vocabulary_pb2.ModelVersion(model=model.name, digest=model.digest), target)
