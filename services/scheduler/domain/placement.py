"""Where models go: a pure function from a snapshot of one pool to loads, rotations and a reason for all that waits.

The oldest demand is placed first. A cold version goes where it is expected to start first, on one of the few nodes it
belongs to (`affinity.py`) rather than elsewhere; else to where the fewest idle instances must leave (of least worth
first, never pinned ones, never one that is in use or waited for: invariant 8); else it waits for a rotation. A rotation
closes instances that have been ready for a quantum, lets their running requests end and then gives their memory to the
oldest demand; so a newly loaded model serves what waits for it before it may be closed, and no demand starves (case
B24). The quantum grows with the load time, which keeps the part of time that loading takes at a third or less.

Gangs (`sites.py`) are placed all or none. Two that wait for the same devices cannot block each other: a younger demand
gives up what was closed for it as soon as an older one is short of devices on that node, and what an older one waits
for is kept free of younger ones.

It decides nothing about requests: `FairQueue` does. It sends nothing: `operations/residency.py` does.
"""

from collections.abc import Sequence

from services.scheduler.domain.candidates import Candidates, Held
from services.scheduler.domain.ground import Ground
from services.scheduler.domain.nodes import InstanceView, NodeView, Role, VersionSpec
from services.scheduler.domain.obstacles import why_nowhere
from services.scheduler.domain.plans import (
    Deferred,
    Load,
    Parting,
    Plan,
    PoolView,
    Reopen,
    ResidencyPolicy,
    Rotate,
    Victim,
    Wait,
    Worth,
)
from services.scheduler.domain.preference import Preference, near_first
from services.scheduler.domain.pressure import LastUses, breaks_promise
from services.scheduler.domain.records import (
    BROKEN,
    PREFILL_STAGE,
    InstanceKey,
    VersionKey,
    digest_of,
    instance_key,
    model_of,
    owner_of,
    version_key,
)
from services.scheduler.domain.sites import Rooms, Site, retry_at_ms, stands_on, strangers

__all__ = [
    "Load",
    "Plan",
    "PoolView",
    "Reopen",
    "ResidencyPolicy",
    "Rotate",
    "Victim",
    "Worth",
    "plan",
    "retry_at_ms",
]

PROMPTS_MS = 60_000  # a model used within this gets an instance for prompts, where there are nodes for them: a guess
ENDING = "the models that hold its memory finish what they run"


def plan(view: PoolView, policy: ResidencyPolicy, now_ms: int) -> Plan:
    """Decide for one pool. Deterministic; O(versions waiting × instances)."""
    return _Planner(view, policy, now_ms).plan()


class _Planner(Ground):
    """Decides. What it knows is in `Ground`."""

    def plan(self) -> Plan:
        state, self.candidates = self.view.state, Candidates(self.view, self.now_ms)
        for depth in state.depths:
            self.oldest[depth.version] = min(depth.oldest_ms, self.oldest.get(depth.version, depth.oldest_ms))
        self.closed = {key: mark.purpose for key, mark in state.drains.items() if mark.until_ms > self.now_ms}
        self.rooms = Rooms.of(self.view, self.now_ms)
        self.uses = LastUses(state)
        reopen = self._reopen()
        for version in sorted(self.oldest, key=lambda version: (self.oldest[version], version)):
            self._place(version)
        wanted = [spec for spec in self.view.specs.values() if spec.min_replicas or spec.pinned]
        for spec in sorted(wanted, key=lambda spec: spec.version):
            self._prewarm(spec)
        if self.view.index.has_prefill:
            for version in sorted(self.view.specs):
                self._serve_prompts(self.view.specs[version])
        reopen += [Reopen(key) for key, purpose in self.given_up.items() if self.closed.get(key) != purpose]
        return Plan(
            tuple(reopen),
            tuple(self.loads),
            tuple(self.rotations),
            tuple(self.deferred),
            tuple(self.busy),
            tuple(self.partings),
        )

    # -- what was closed --------------------------------------------------------------------------------------------

    def _reopen(self) -> list[Reopen]:
        done = [key for key, purpose in self.closed.items() if purpose != BROKEN and self._is_moot(purpose)]
        done += [key for key in self._yielded() if key not in done]
        for key in done:
            del self.closed[key]
        return [Reopen(key) for key in sorted(done)]

    def _is_moot(self, purpose: VersionKey) -> bool:
        return not self.is_claimed(purpose) and (purpose not in self.oldest or self.is_here(purpose))

    def _yielded(self) -> list[InstanceKey]:
        """What was closed for demands younger than one that is short of devices there: no two wait for each other."""
        yielded: list[InstanceKey] = []
        for node in self._marked():
            marks = [key for key in self.keys(node) if key in self.closed]
            rivals = {self.closed[key] for key in marks if not self.is_claimed(self.closed[key])} & self.oldest.keys()
            short = False
            for version in sorted(rivals, key=lambda version: (self.oldest[version], version)):
                if short:
                    yielded += [key for key in marks if self.closed[key] == version]
                short = short or (len(rivals) > 1 and self._is_short(node, version))
        return yielded

    def _marked(self) -> list[NodeView]:
        if not self.closed:
            return []
        return [node for node in self.view.nodes if any(key in self.closed for key in self.keys(node))]

    def _is_short(self, node: NodeView, version: VersionKey) -> bool:
        spec, leaving = self.view.specs.get(version), self.closed_for(node, version)
        return spec is not None and all(
            self.just_enough(spec, site, leaving) is None for site in self.sites_of(spec, [node])
        )

    # -- demands ----------------------------------------------------------------------------------------------------

    def _wait(self, version: VersionKey, why: Wait, reason: str) -> None:
        self.deferred.append(Deferred(version, why, reason))

    def _place(self, version: VersionKey) -> None:
        """Place one waiting version, or say why it must wait."""
        if any(self.is_open(node, version) for node in self.view.holders(version)):
            return self._place_another(version)
        if self.is_here(version) or self.is_claimed(version):
            return self._wait(version, Wait.LOADING, "its load has begun")
        spec = self.view.specs.get(version)
        if spec is None:
            return self._wait(version, Wait.UNKNOWN, "the catalogue does not have it any more")
        nodes, held = self.candidates.of(spec), self.candidates.held_by_others(spec)
        apart = self.candidates.apart(spec)
        if not nodes and not held and not apart:
            return self._wait(version, *why_nowhere(self.view, spec, self.now_ms))
        groups = list(near_first(self.view, spec, nodes))
        if (
            self._continue_rotation(spec, nodes)
            or any(self._load_free(spec, group, "demand") for group in groups)
            or self._change_hands(spec, held)
            or any(self._load_evicting(spec, group, "demand") for group in groups)
            or self._part(spec, apart, patient=self.now_ms - self.oldest[version] < self.policy.patience_ms)
        ):
            return None
        if self.now_ms - self.oldest[version] < self.policy.patience_ms:
            return self._wait(version, Wait.ROOM, "no memory is free and no instance is idle")
        if not any(self._close_over(spec, self.sites_of(spec, group), held) for group in groups):
            self._promise(spec, self.sites_of(spec, groups[0]))
            self._wait(version, Wait.TURN, "no memory is free; the models that hold it have not had their time yet")
        return None

    def _place_another(self, version: VersionKey) -> None:
        """One more instance if what waits takes longer than the model promises, and not before."""
        spec = self.view.specs.get(version)
        arriving = self.is_claimed(version) or any(self.arrives(node, version) for node in self.view.holders(version))
        if spec is None or arriving or not breaks_promise(self.view, version):
            self.busy.append(Deferred(version, Wait.SLOTS, "every slot of its instances is in use"))
        elif not self._load_somewhere(spec, self.candidates.of(spec), "backlog"):
            self.busy.append(Deferred(version, Wait.SLOTS, "every slot is in use, and there is no room for another"))

    def _waits_its_turn(self, version: VersionKey) -> bool:
        """Whether a version may only take the place of what has had its time: it has one already, or is in a circle."""
        wanted_ms = self.oldest.get(version, self.now_ms)
        return self.is_here(version) or self.uses.came_back(version, wanted_ms, self.policy.quantum_ms)

    def _change_hands(self, spec: VersionSpec, held: Sequence[Held]) -> bool:
        """Give it an instance of the same version that stands for somebody else: idle, or closed for this and done."""
        for node, found in held:
            ours = self.closed.get(instance_key(node.node_id, found.version)) == spec.version
            site = Site(node, stands_on(node, found))
            if ours and self.in_use(node, found):
                self._close(spec, site, [found])
                self._wait(spec.version, Wait.DRAINING, ENDING)
                return True
            if ours or self.is_idle(node, found):
                self._load(spec, site, [found], "demand")
                return True
        return False

    def _part(self, spec: VersionSpec, apart: Sequence[Held], *, patient: bool) -> bool:
        """Have the same version leave where it stands for somebody else and cannot change hands: it is idle, has had
        its time, or was closed for this before."""
        for node, found in apart:
            victim = _victim(node, found)
            ours = self.closed.get(victim.instance) == spec.version
            ripe = not patient and self.may_leave(node, found) and self.over_ms(found) <= self.now_ms
            if ours or ripe or self.is_idle(node, found):
                self.partings.append(Parting(victim, node.node_id, spec.version))
                self.closed[victim.instance] = spec.version
                self.idle.pop(node.node_id, None)
                self._wait(spec.version, Wait.DRAINING, "it leaves where it stands for others, and loads anew")
                return True
        return False

    def _load_somewhere(self, spec: VersionSpec, nodes: list[NodeView], reason: str) -> bool:
        groups = list(near_first(self.view, spec, nodes))
        return any(self._load_free(spec, group, reason) for group in groups) or any(
            self._load_evicting(spec, group, reason) for group in groups
        )

    def _load_free(self, spec: VersionSpec, nodes: list[NodeView], reason: str) -> bool:
        roomy = [node for node in nodes if self.rooms.has_room(node, spec.share)]
        fitting = [
            site
            for site in self.sites_of(spec, roomy)
            if self.rooms.fits(site, spec.share) and not strangers(site, spec)
        ]
        if not fitting:
            return False
        self._load(spec, min(fitting, key=self._preference(spec)), [], reason)
        return True

    def _preference(self, spec: VersionSpec) -> Preference:
        return Preference.of(self.view, spec, self.rooms, self.candidates.able(spec))

    def _load_evicting(self, spec: VersionSpec, nodes: list[NodeView], reason: str) -> bool:
        prefer, choices, in_turn = self._preference(spec), [], self._waits_its_turn(spec.version)
        for site in self.sites_of(spec, nodes):
            idle = self.idle_on(site.node)
            if in_turn:
                idle = [each for each in idle if self.over_ms(each) <= self.now_ms]
            chosen = self.just_enough(spec, site, idle)
            if chosen:
                dearest = max(self.worth_of(site.node, each) for each in chosen)
                choices.append((len(chosen), dearest, prefer(site), site, chosen))
        if not choices:
            return False
        *_, site, chosen = min(choices, key=lambda choice: choice[:3])
        self._load(spec, site, chosen, reason)
        return True

    # -- rotation ---------------------------------------------------------------------------------------------------

    def _close_over(self, spec: VersionSpec, places: Sequence[Site], held: Sequence[Held]) -> bool:
        """Close what has had its time, where that is enough."""
        over = [
            (self.in_use(node, found), 1, _rank(site), site, [found])
            for node, found in held
            if self.may_leave(node, found) and self.over_ms(found) <= self.now_ms
            for site in [Site(node, stands_on(node, found))]
        ]
        for site in places:
            ripe = [each for each in self.leavers(site.node) if self.over_ms(each) <= self.now_ms]
            if chosen := self.just_enough(spec, site, ripe):
                busy = sum(self.in_use(site.node, each) for each in chosen)
                over.append((busy, len(chosen), _rank(site), site, chosen))
        if not over:
            return False
        *_, site, chosen = min(over, key=lambda choice: choice[:3])
        self._close(spec, site, chosen)
        self._wait(spec.version, Wait.DRAINING, ENDING)
        return True

    def _promise(self, spec: VersionSpec, places: Sequence[Site]) -> None:
        """Keep the site whose time comes first for this demand: younger ones neither fill nor close it meanwhile."""
        later = [
            (max(self.over_ms(each) for each in chosen), _rank(site), site, chosen)
            for site in places
            if (chosen := self.just_enough(spec, site, self.leavers(site.node)))
        ]
        if later:
            *_, site, chosen = min(later, key=lambda choice: choice[:2])
            self.rooms.reserve(site, spec.share, chosen, alone=spec.alone)
            self.promised.update(instance_key(site.node.node_id, each.version) for each in chosen)
            self.idle.pop(site.node.node_id, None)

    def _continue_rotation(self, spec: VersionSpec, nodes: list[NodeView]) -> bool:
        """Go on where instances were closed for this version; whether there are any, and they are enough."""
        if spec.version not in self.closed.values():
            return False
        for node in nodes:
            leaving = self.closed_for(node, spec.version)
            if not leaving:
                continue
            for site in self.sites_of(spec, [node]):
                chosen = self.just_enough(spec, site, leaving)
                if chosen is None:
                    continue
                if any(self.in_use(node, each) for each in chosen):
                    self._close(spec, site, chosen)
                    self._wait(spec.version, Wait.DRAINING, ENDING)
                else:
                    self._load(spec, site, chosen, "demand")
                return True
            for each in leaving:  # not enough any more: they may leave with others, or go on serving
                key = instance_key(node.node_id, each.version)
                self.given_up[key] = self.closed.pop(key)
                self.idle.pop(node.node_id, None)
        return False

    def _close(self, spec: VersionSpec, site: Site, leaving: list[InstanceView]) -> None:
        for each in leaving:
            victim = _victim(site.node, each)
            self.rotations.append(Rotate(victim, spec.version))
            self.closed[victim.instance] = spec.version
        self.idle.pop(site.node.node_id, None)
        self.rooms.reserve(site, spec.share, leaving, alone=spec.alone)

    # -- loads ------------------------------------------------------------------------------------------------------

    def _load(self, spec: VersionSpec, site: Site, leaving: list[InstanceView], reason: str) -> None:
        victims = tuple(_victim(site.node, each) for each in leaving)
        devices = site.devices if site.node.devices else ()
        self.loads.append(
            Load(spec.version, site.node.node_id, spec.device_bytes, victims, reason, devices, spec.alone_for)
        )
        for victim in victims:
            self.closed[victim.instance] = spec.version
        self.idle.pop(site.node.node_id, None)
        self.rooms.spend(site, spec.share, leaving)

    def _prewarm(self, spec: VersionSpec) -> None:
        if self.is_claimed(spec.version):
            return
        planned = any(load.version == spec.version for load in self.loads)
        if not planned and self.replicas(spec.version) < spec.replicas_wanted:
            self._load_somewhere(spec, self.candidates.of(spec), "prewarm")

    def _serve_prompts(self, spec: VersionSpec) -> None:
        """An instance on a prefill node for a model that decode nodes serve. It takes nothing from decode nodes, no
        request waits for it, and its load is claimed under a name of its own: it delays no other load of the model."""
        since_ms = self.now_ms - PROMPTS_MS
        if owner_of(spec.version) or not any(
            node.role is Role.DECODE
            and self.is_open(node, spec.version)
            and self.view.state.used_ms.get(instance_key(node.node_id, spec.version), 0) > since_ms
            for node in self.view.holders(spec.version)
        ):
            return
        wanted = prompt_spec(spec)
        if self.is_here(wanted.version) or self.is_claimed(wanted.version):
            return
        nodes = self.candidates.of(wanted)
        if not self._load_free(wanted, nodes, "prompts"):
            quiet = [node for node in nodes if all(self.worth_of(node, each)[1] <= since_ms for each in node.instances)]
            self._load_evicting(wanted, quiet, "prompts")


def prompt_spec(spec: VersionSpec) -> VersionSpec:
    """The same version as it stands on prefill nodes."""
    version = version_key(model_of(spec.version), digest_of(spec.version), PREFILL_STAGE)
    return VersionSpec(version, spec.device_bytes, devices=spec.devices)


def _rank(site: Site) -> tuple[str, tuple[int, ...]]:
    return site.node.node_id, site.devices


def _victim(node: NodeView, instance: InstanceView) -> Victim:
    return Victim(instance_key(node.node_id, instance.version), instance.version)
