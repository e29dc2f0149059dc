"""Why no node may load a version now, for people and for the metric's label. Pure."""

from services.scheduler.domain.nodes import VersionSpec
from services.scheduler.domain.plans import PoolView, Wait
from services.scheduler.domain.sites import could_ever_hold, is_held, leaves, retry_at_ms, serves

NO_NODE = "no healthy node may load it now"
HELD_APART = "it is on its way to its nodes for others, and one of them has its devices alone"


def devices_needed(spec: VersionSpec) -> str:
    """What a version stands on, in words."""
    kind = "MIG slice" if spec.alone else "device"
    if spec.devices == 1:
        return f"a {kind} of {spec.share} bytes"
    return f"{spec.devices} linked {kind}s of {spec.share} bytes"


def why_nowhere(view: PoolView, spec: VersionSpec, now_ms: int) -> tuple[Wait, str]:
    """The reason that is nearest to being over. O(nodes)."""
    healthy = [node for node in view.nodes if node.healthy and serves(node, spec.version)]
    if not any(could_ever_hold(node, spec) for node in healthy):
        if not healthy or (spec.devices == 1 and not spec.alone):
            return Wait.NODE, NO_NODE
        return Wait.DEVICES, f"no healthy node has {devices_needed(spec)}"
    if any(leaves(node, spec.version) for node in healthy):
        return Wait.DRAINING, "it is being unloaded, and loads again afterwards"
    if any(retry_at_ms(view.state, node, spec.version) > now_ms for node in healthy):
        return Wait.BACK_OFF, "its load failed; the next try is not due yet"
    if any(is_held(node, spec.version) and node.find(spec.version) is None for node in healthy):
        return Wait.NODE, HELD_APART
    return Wait.NODE, NO_NODE
