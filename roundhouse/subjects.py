"""Every NATS subject, stream and bucket of the mesh, and the encoding of ids in subjects.

Contract: ARCHITECTURE.md, "NATS subjects". An id inside a subject is encoded so that `.`, `*`, `>`, spaces and control
characters cannot occur: letters, digits, `-` and `_` stay, every other byte becomes `=XX`.
"""

import string

_SAFE = frozenset((string.ascii_letters + string.digits + "-_").encode())
_PREFIX = "rh.v1"

WORK_SUBMIT = f"{_PREFIX}.work.submit"
WORK_SUBMIT_TO_ALL = f"{_PREFIX}.work.submit.all"  # every replica takes it: for what one of them did not answer
WORK_CANCEL = f"{_PREFIX}.work.cancel"
WORK_FINISHED = f"{_PREFIX}.work.finished"
WORK_HEARTBEAT = f"{_PREFIX}.work.heartbeat"
WORK_EXPLAIN = f"{_PREFIX}.work.explain"
FORECAST = f"{_PREFIX}.scheduler.forecast"
CATALOGUE_CHANGED = f"{_PREFIX}.catalogue.changed"
NODE_STATES = f"{_PREFIX}.node.*.state"
NODES_LOST = f"{_PREFIX}.node.*.lost"
KV_BLOCKS = f"{_PREFIX}.kv.*.blocks"

SCHEDULER_GROUP = "scheduler"

USAGE_STREAM = "USAGE"
USAGE_SUBJECTS = f"{_PREFIX}.usage.>"
BILLING_STREAM = "BILLING"
BILLING_SUBJECTS = f"{_PREFIX}.billing.>"
BILLING_RECORDS = f"{_PREFIX}.billing.*"  # rated records alone
BUDGET_ALERTS = f"{_PREFIX}.billing.*.budget.>"
ERASURES_STREAM = "ERASURES"
ERASURES = f"{_PREFIX}.erasures"  # of tenants' cached blocks, for nodes that were away
AUDIT_STREAM = "AUDIT"
AUDIT_SUBJECTS = f"{_PREFIX}.audit.>"
NODES_BUCKET = "nodes"


def encode_token(text: str) -> str:
    """One subject token for an arbitrary id. Injective; the empty id is refused with ValueError."""
    if not text:
        raise ValueError("an id in a subject must not be empty")
    return "".join(chr(byte) if byte in _SAFE else f"={byte:02X}" for byte in text.encode())


def gateway_grant(gateway_id: str) -> str:
    """Where one gateway receives its grants."""
    return f"{_PREFIX}.gateway.{encode_token(gateway_id)}.grant"


def node_state(node_id: str) -> str:
    """Where one node's loader says what is loaded."""
    return f"{_PREFIX}.node.{encode_token(node_id)}.state"


def node_lost(node_id: str) -> str:
    """Where gateways say that they have lost one node."""
    return f"{_PREFIX}.node.{encode_token(node_id)}.lost"


def kv_blocks(node_id: str) -> str:
    """Where one node's kvstore says what it stored and dropped."""
    return f"{_PREFIX}.kv.{encode_token(node_id)}.blocks"


def usage(tenant_id: str) -> str:
    """Usage events of one tenant (JetStream USAGE)."""
    return f"{_PREFIX}.usage.{encode_token(tenant_id)}"


def billing(tenant_id: str) -> str:
    """Rated records of one tenant (JetStream BILLING)."""
    return f"{_PREFIX}.billing.{encode_token(tenant_id)}"


def budget_alert(tenant_id: str, period: str, percent: int) -> str:
    """Where it is told that a tenant reached a share of its budget (JetStream BILLING). One message each, ever."""
    return f"{billing(tenant_id)}.budget.{encode_token(period)}.{percent}"


def audit(what: str) -> str:
    """Audit events of one kind (JetStream AUDIT)."""
    return f"{_PREFIX}.audit.{encode_token(what)}"
