"""What the replicas agree on about residency: drain marks, load claims, failed loads. Pure, one book a pool.

A drain mark closes an instance for new grants. It is given only if the instance is idle and nobody waits for its model
(invariant 8), and until the order to unload it is sent, a request for it takes the mark away (invariant 9); or, to
rotate, at once: then its running requests end first and `in_use` says when. A load claim is one
replica's right to have a version loaded (invariant 7). Both end by themselves, so a crashed replica blocks nothing. A
claim names the revision of the snapshot it was decided on: two replicas cannot both spend the same free memory. It also
says for whom the instance is: from then on only its owner's requests are offered it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from roundhouse.vocabulary import NodeId, TenantId
from services.scheduler.domain.records import (
    Drain,
    DrainDenied,
    Draining,
    DrainMark,
    DrainStage,
    InstanceKey,
    LoadClaim,
    LoadFailure,
    Offer,
    VersionKey,
    base_of,
    instance_key,
    owner_of,
)

NOTES_MOST = 1_000  # a guess: more than a large pool has at once, and read in milliseconds


@dataclass(frozen=True, slots=True)
class Claimed:
    """The claim stands."""


@dataclass(frozen=True, slots=True)
class ClaimDenied:
    """Another replica loads the version, or the snapshot is old."""

    stale: bool


Claim = Claimed | ClaimDenied


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Close an instance for new grants in favour of `purpose`."""

    instance: InstanceKey
    version: VersionKey
    purpose: VersionKey
    until_ms: int
    rotate: bool  # close it although it is in use or wanted


@dataclass(frozen=True, slots=True)
class ClaimOrder:
    """Claim the load of a version."""

    version: VersionKey
    claim: LoadClaim
    revision: int


@dataclass(slots=True)
class ResidencyBook:
    """Mutable; owned by one `FairQueue`."""

    revision: int = 0
    drains: dict[InstanceKey, DrainMark] = field(default_factory=dict)
    loads: dict[VersionKey, LoadClaim] = field(default_factory=dict)
    failures: dict[tuple[VersionKey, NodeId], LoadFailure] = field(default_factory=dict)
    owners: dict[InstanceKey, TenantId] = field(default_factory=dict)

    def is_draining(self, instance: InstanceKey, now_ms: int) -> bool:
        """Whether the instance is closed for new grants."""
        mark = self.drains.get(instance)
        return mark is not None and mark.until_ms > now_ms

    def stands(self, offer: Offer, now_ms: int) -> bool:
        """Whether an instance is open and still belongs to whom it did when it was offered."""
        return self.owners.get(offer.instance, "") == offer.owner and not self.is_draining(offer.instance, now_ms)

    def begin_drain(self, order: DrainOrder, in_use: int, waiting: int, now_ms: int) -> Drain:
        """Mark an instance. Repeating it for the same purpose renews the mark; another purpose is denied."""
        mark = self.drains.get(order.instance)
        ours = mark is not None and mark.until_ms > now_ms and mark.purpose == order.purpose
        if not ours and mark is not None and mark.until_ms > now_ms:
            return DrainDenied(in_use, waiting)
        if not ours and not order.rotate and (in_use or waiting):
            return DrainDenied(in_use, waiting)
        stage = DrainStage.ROTATING if order.rotate else DrainStage.IDLE
        if ours and mark is not None:
            stage = mark.stage
        self.drains[order.instance] = DrainMark(order.purpose, order.until_ms, stage, base_of(order.version))
        self.revision += 1
        return Draining(in_use)

    def send_drains(self, purpose: VersionKey, instances: Sequence[InstanceKey], until_ms: int, now_ms: int) -> bool:
        """The order to unload them is sent now. False, and nothing changes, if a mark is not there any more."""
        marks = [self.drains.get(instance) for instance in instances]
        if any(mark is None or mark.until_ms <= now_ms or mark.purpose != purpose for mark in marks):
            return False
        for instance, mark in zip(instances, marks, strict=True):
            assert mark is not None, "looked up above"
            self.drains[instance] = DrainMark(purpose, until_ms, DrainStage.SENT, mark.of)
        self.revision += 1
        return True

    def reclaim(self, version: VersionKey) -> None:
        """A request for a version came: its instances that were closed as unwanted, and not sent away yet, stay."""
        base = base_of(version)
        kept = [key for key, mark in self.drains.items() if mark.stage is DrainStage.IDLE and mark.of == base]
        for key in kept:
            self.clear_drain(key)

    def clear_drain(self, instance: InstanceKey, purpose: VersionKey | None = None) -> None:
        """Open an instance again, if it is closed for `purpose` (None: for whatever). Idempotent."""
        mark = self.drains.get(instance)
        if mark is not None and purpose in (None, mark.purpose):
            del self.drains[instance]
            self.revision += 1

    def claim_load(self, order: ClaimOrder, now_ms: int) -> Claim:
        """Claim a load; idempotent for one owner only by `renew_load`."""
        held = self.loads.get(order.version)
        if held is not None and held.until_ms > now_ms:
            return ClaimDenied(stale=False)
        if order.revision != self.revision:
            return ClaimDenied(stale=True)
        self.loads[order.version] = order.claim
        instance = instance_key(order.claim.node_id, order.version)
        if owner := owner_of(order.version):
            self.owners[instance] = TenantId(owner)
        else:
            self.owners.pop(instance, None)
        self.revision += 1
        return Claimed()

    def renew_load(self, version: VersionKey, owner: str, until_ms: int) -> bool:
        """Keep a claim; False if it is no longer the owner's."""
        held = self.loads.get(version)
        if held is None or held.owner != owner:
            return False
        self.loads[version] = replace(held, until_ms=until_ms)
        return True

    def release_load(self, version: VersionKey, node_id: NodeId, owner: str, failure: LoadFailure | None) -> None:
        """End a claim and record how the load ended; success forgets earlier failures on that node."""
        held = self.loads.get(version)
        if held is not None and held.owner == owner:
            del self.loads[version]
        if failure is None:
            self.failures.pop((version, node_id), None)
        else:
            self.failures[(version, node_id)] = failure
        self.revision += 1

    def forget(self, now_ms: int) -> None:
        """Drop void notes where there are many: nodes and versions come and go, and leave theirs behind."""
        if len(self.drains) > NOTES_MOST:
            self.drains = {key: mark for key, mark in self.drains.items() if mark.until_ms > now_ms}
        if len(self.loads) > NOTES_MOST:
            self.loads = {key: claim for key, claim in self.loads.items() if claim.until_ms > now_ms}
        if len(self.failures) > NOTES_MOST:
            self.failures = {key: each for key, each in self.failures.items() if each.retry_at_ms > now_ms}
