"""What a request may expect before it is queued: cached prefixes, a start, and who could answer instead.

From this replica's memory alone: the store is asked once, with the request.
"""

from dataclasses import dataclass

from roundhouse.catalogue.records import Catalogue, Model
from roundhouse.clock import Clock
from roundhouse.vocabulary import PoolName, TenantId
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.scheduler.domain.expectation import Expectation, Prompt, expect, first_token_ms, open_instances
from services.scheduler.domain.nodes import VersionSpec
from services.scheduler.domain.plans import PoolView, ResidencyPolicy
from services.scheduler.domain.prefix_index import PrefixIndex
from services.scheduler.domain.records import InstanceKey, VersionKey, instance_key
from services.scheduler.domain.viability import Viable, viability
from services.scheduler.operations.pools import Pools

BLOCK_TOKENS = 16  # of a prefix block (ARCHITECTURE.md, "Words"); gateways cut prompts so
WARM_MOST = 16  # instances named with a request: more replicas of one model than keep one prefix


@dataclass(frozen=True, slots=True)
class Outlook:
    """For one request and one model."""

    view: PoolView
    spec: VersionSpec
    expected: Expectation
    prompt: Prompt
    first_token_ms: int  # from the start

    @property
    def total_ms(self) -> int:
        """Until the first token, without the queue."""
        return self.expected.start_ms + self.first_token_ms

    def promise_ms(self, model: Model, *, is_ready: bool) -> int:
        """What callers of the model are promised: time to first token, also with a cold start."""
        return model.ttft_slo_ms if is_ready else model.cold_start_slo_ms


class Outlooks:
    """Makes outlooks."""

    def __init__(self, pools: Pools, index: PrefixIndex, policy: ResidencyPolicy, clock: Clock) -> None:
        self._pools = pools
        self._index = index
        self._policy = policy
        self._clock = clock

    def of(self, pool: PoolName, version: VersionKey, model: Model, request: wire.SubmitRequest) -> Outlook:
        """For a version in a pool."""
        view, now_ms = self._pools.view(pool), self._clock.now_ms()
        spec = view.specs.get(version) or self._pools.spec(version)
        spec = spec or VersionSpec(version, model.device_bytes, devices=model.tensor_parallel)  # an older version
        prompt = Prompt(request.input_tokens, self._warm(view, spec, request, now_ms))
        return Outlook(
            view,
            spec,
            expect(view, spec, self._policy, now_ms),
            prompt,
            first_token_ms(view, spec, self._pools.speeds, prompt, now_ms),
        )

    def fallback(self, catalogue: Catalogue, model: Model, request: wire.SubmitRequest) -> tuple[Model, Outlook] | None:
        """The model that may answer instead, if the request and the catalogue allow it and it could run."""
        tenant_id = TenantId(request.tenant_id)
        other = catalogue.fallback_of(tenant_id, model) if request.fallback_allowed else None
        if other is None or request.adapter:
            return None
        version = self._pools.queued_as(tenant_id, other.name, other.digest)
        outlook = self.of(catalogue.pool_of(tenant_id, other), version, other, request)
        return (other, outlook) if _could_run(outlook, self._clock.now_ms()) else None

    def _warm(
        self, view: PoolView, spec: VersionSpec, request: wire.SubmitRequest, now_ms: int
    ) -> tuple[tuple[InstanceKey, int], ...]:
        found = []
        for node, _ in open_instances(view, spec, now_ms) if request.block_keys else ():
            cached = self._index.cached_blocks(node.node_id, request.block_keys) * BLOCK_TOKENS
            if cached:
                found.append((instance_key(node.node_id, spec.version), min(cached, request.input_tokens)))
        return tuple(sorted(found, key=lambda each: (-each[1], each[0]))[:WARM_MOST])


def _could_run(outlook: Outlook, now_ms: int) -> bool:
    return isinstance(viability(outlook.view, outlook.spec, now_ms), Viable)
