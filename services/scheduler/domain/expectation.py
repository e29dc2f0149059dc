"""What a request that comes now may expect: how long until an instance can take it, and why not at once.

Optimistic where it does not know (it plans for this one model alone): what is refused by it could not have been served
in time. Pure; the queue's own wait is added by the store, which knows who else waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.domain.candidates import Candidates
from services.scheduler.domain.cold_start import UNLOAD_MS, estimate, remaining
from services.scheduler.domain.nodes import ARRIVING, InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.obstacles import why_nowhere
from services.scheduler.domain.plans import PoolView, ResidencyPolicy, Wait
from services.scheduler.domain.preference import near_first
from services.scheduler.domain.records import InstanceKey, instance_key
from services.scheduler.domain.sites import Rooms, Site, sites, strangers
from services.scheduler.domain.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Expectation:
    """`start_ms` until an instance is there, whoever waits before; `why` None = a slot is free now."""

    start_ms: int
    why: Wait | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What of a request decides its first token."""

    input_tokens: int
    warm: tuple[tuple[InstanceKey, int], ...] = ()


def expect(view: PoolView, spec: VersionSpec, policy: ResidencyPolicy, now_ms: int) -> Expectation:
    """For one version. O(its instances); if it is cold, of all nodes, of which the near ones are looked at closely."""
    instances = open_instances(view, spec, now_ms)
    if instances:
        if any(_free_slots(view, node, each) for node, each in instances):
            return Expectation(0)
        return Expectation(0, Wait.SLOTS, "every slot of its instances is in use")
    arriving = [
        remaining(view, node, spec, found, now_ms)
        for node in view.holders(spec.version)
        if node.healthy and (found := node.find(spec.version)) is not None and found.residence in ARRIVING
    ]
    if arriving:
        return Expectation(min(arriving), Wait.LOADING, "its load has begun")
    claim = view.state.loads.get(spec.version)
    if claim is not None and claim.until_ms > now_ms:
        starts = [estimate(view, node, spec).total_ms for node in view.nodes if node.node_id == claim.node_id]
        return Expectation(min(starts, default=0), Wait.LOADING, "its load has begun")
    near = next(near_first(view, spec, Candidates(view, now_ms).of(spec)))
    return _cold(view, spec, policy, near, now_ms)


def first_token_ms(view: PoolView, spec: VersionSpec, speeds: Speeds, prompt: Prompt, now_ms: int) -> int:
    """From the start on the best instance to the first token, as if nothing else ran there."""
    warm = dict(prompt.warm)
    keys = [instance_key(node.node_id, spec.version) for node, _ in open_instances(view, spec, now_ms)]
    times = [
        max(0, prompt.input_tokens - warm.get(key, 0)) * speeds.of(key, spec.version, now_ms).token_us
        for key in keys or [InstanceKey("")]
    ]
    return round(min(times) / 1000)


def open_instances(view: PoolView, spec: VersionSpec, now_ms: int) -> list[tuple[NodeView, InstanceView]]:
    """Ready instances that take requests."""
    found = []
    for node in view.holders(spec.version):
        each = node.find(spec.version) if node.healthy else None
        if each is not None and each.residence is Residence.READY:
            mark = view.state.drains.get(instance_key(node.node_id, spec.version))
            if mark is None or mark.until_ms <= now_ms:
                found.append((node, each))
    return found


def _free_slots(view: PoolView, node: NodeView, instance: InstanceView) -> int:
    return instance.slots - view.state.in_use.get(instance_key(node.node_id, instance.version), 0)


def _cold(
    view: PoolView, spec: VersionSpec, policy: ResidencyPolicy, nodes: Sequence[NodeView], now_ms: int
) -> Expectation:
    rooms, best = Rooms.of(view, now_ms), Expectation(0, *why_nowhere(view, spec, now_ms))
    found: list[tuple[int, Expectation]] = []
    for node in nodes:
        for site in sites(node, spec, view):
            wait_ms, why, reason = _until_room(view, rooms, spec, policy, site, now_ms)
            start_ms = wait_ms + estimate(view, node, spec).total_ms
            found.append((start_ms, Expectation(start_ms, why, reason)))
    return min(found, key=lambda each: each[0])[1] if found else best


def _until_room(
    view: PoolView, rooms: Rooms, spec: VersionSpec, policy: ResidencyPolicy, site: Site, now_ms: int
) -> tuple[int, Wait, str]:
    others = strangers(site, spec)
    if rooms.fits(site, spec.share) and not others:
        return 0, Wait.LOADING, "it is loaded first"
    awaited = {depth.version for depth in view.state.depths}
    ready = [each for each in site.node.instances if each.residence is Residence.READY]
    idle = [
        each
        for each in ready
        if each.version not in awaited
        and not view.state.in_use.get(instance_key(site.node.node_id, each.version), 0)
        and not _must_stay(view, each)
    ]

    def over_ms(each: InstanceView) -> int:
        took_ms = each.stage_ms + each.load_ms
        return each.since_ms + max(policy.quantum_ms, policy.quantum_loads * took_ms)

    chosen = rooms.just_enough(site, spec.share, idle, lambda each: (each.version,), others)
    if chosen is not None:
        return len(chosen) * UNLOAD_MS, Wait.LOADING, "it is loaded first, after others have left"
    busy = [each for each in ready if not _must_stay(view, each)]
    chosen = rooms.just_enough(site, spec.share, busy, lambda each: (over_ms(each), each.version), others)
    turn = "no memory is free; the models that hold it have their time first"
    if chosen is None:
        return policy.quantum_ms, Wait.ROOM, "no memory is free and nothing may leave"
    wait_ms = max(policy.patience_ms, max(over_ms(each) for each in chosen) - now_ms)
    return wait_ms + len(chosen) * UNLOAD_MS, Wait.TURN, turn


def _must_stay(view: PoolView, instance: InstanceView) -> bool:
    """Pins and minimum replicas; how many there are is placement's to count."""
    spec = view.specs.get(instance.version)
    return spec is not None and spec.replicas_wanted > 0
