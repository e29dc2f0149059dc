"""How fast each instance brings first tokens, learned from the requests that ended there.

Two numbers an instance: the prefill time of one uncached token, and the first-token time of its usual request (what a
full instance makes the next one wait about once more). Moving averages; an instance that nothing is known of is taken
to be as fast as the same version elsewhere, else as `PRIOR_TOKEN_US`. And one a version: what a hand-over costs, from
the first token on one node to the next on another; blocks are moved while the prompt is computed, so that it does not
grow with the prompt as long as the network is faster than the prefill. Pure; each replica learns from its share.
"""

from dataclasses import dataclass, field

from services.scheduler.domain.records import InstanceKey, VersionKey, base_of

PRIOR_TOKEN_US = 100  # 10,000 tokens/s: a 7B model's prefill on one data-centre GPU, to the nearest power of ten
PRIOR_HANDOFF_US = 10_000  # two messages and the first read, a guess, until one was measured
KEEP = 0.8  # of an average at each request: about the last five, so that a slow node is known within seconds
FORGET = 0.02  # of a measured hand-over at each request that is not handed over: half is forgotten after 35, a guess
TOKENS_LEAST = 32  # a shorter prompt says more of the round trip than of the prefill
INSTANCES_MOST = 20_000  # 1,000 nodes with 20 models each; the one learned of longest ago is forgotten first


@dataclass(frozen=True, slots=True)
class Speed:
    """What is known of one instance, or of one version anywhere."""

    token_us: float
    first_us: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's way to its first token."""

    instance: InstanceKey
    version: VersionKey
    uncached_tokens: int
    first_token_ms: int  # from the start of its stream


@dataclass(slots=True)
class Speeds:
    """All instances. Mutable."""

    instances: dict[InstanceKey, Speed] = field(default_factory=dict)
    versions: dict[VersionKey, Speed] = field(default_factory=dict)
    handoffs_us: dict[VersionKey, float] = field(default_factory=dict)

    def learn(self, seen: FirstToken) -> None:
        """Take a finished request in. O(1)."""
        if seen.first_token_ms <= 0:
            return
        version = base_of(seen.version)
        known = self.instances.pop(seen.instance, None)
        self.instances[seen.instance] = _moved(known or self.versions.get(version), seen)
        self.versions[version] = _moved(self.versions.pop(version, None), seen)
        if len(self.instances) > INSTANCES_MOST:
            del self.instances[next(iter(self.instances))]
        if len(self.versions) > INSTANCES_MOST:
            del self.versions[next(iter(self.versions))]

    def learn_handoff(self, version: VersionKey, handoff_ms: int) -> None:
        """Take a hand-over in; 0 = this request had none, and what was measured counts a little less. O(1)."""
        before = self.handoffs_us.pop(base_of(version), None)
        if handoff_ms > 0:
            seen_us = handoff_ms * 1000.0
            self.handoffs_us[base_of(version)] = seen_us if before is None else KEEP * before + (1 - KEEP) * seen_us
        elif before is not None:  # else one that was slow by accident would end all hand-overs, and never be corrected
            self.handoffs_us[base_of(version)] = before + FORGET * (PRIOR_HANDOFF_US - before)
        if len(self.handoffs_us) > INSTANCES_MOST:
            del self.handoffs_us[next(iter(self.handoffs_us))]

    def handoff_us(self, version: VersionKey) -> float:
        """What handing over a prompt of a version is expected to cost."""
        return self.handoffs_us.get(base_of(version), PRIOR_HANDOFF_US)

    def of(self, instance: InstanceKey, version: VersionKey) -> Speed:
        """The expectation for an instance."""
        found = self.instances.get(instance) or self.versions.get(base_of(version))
        return found or Speed(PRIOR_TOKEN_US, 0.0)


def _moved(before: Speed | None, seen: FirstToken) -> Speed:
    first_us = seen.first_token_ms * 1000.0
    long = seen.uncached_tokens >= TOKENS_LEAST
    token_us = first_us / seen.uncached_tokens if long else float(PRIOR_TOKEN_US)
    if before is None:
        return Speed(token_us, first_us)
    return Speed(
        KEEP * before.token_us + (1 - KEEP) * token_us if long else before.token_us,
        KEEP * before.first_us + (1 - KEEP) * first_us,
    )
