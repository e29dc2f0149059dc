"""The names of the gateway's Redis keys. Everything of a tenant that one script touches has the tenant's hash tag.

Tenant names have no braces (`declaration` refuses them), so a name cannot leave its tag.
"""

from roundhouse.vocabulary import KeyId, RequestId, TenantId


def key_index(key_hash: str) -> str:
    """Key hash → whose it is. Written once, deleted when revoked."""
    return f"rh:keys:{key_hash}"


def key_owner(key_id: KeyId) -> str:
    """Key id → tenant, so that a key can be revoked by its id alone."""
    return f"rh:keys:id:{key_id}"


def alive_keys(tenant_id: TenantId) -> str:
    """Hash: key hash → when it expires, ms (0 = never). What is not in it is dead."""
    return f"rh:{{t:{tenant_id}}}:keys"


def key_records(tenant_id: TenantId) -> str:
    """Hash: key id → record, revoked keys included."""
    return f"rh:{{t:{tenant_id}}}:key_records"


def meters(tenant_id: TenantId, scope: str = "") -> str:
    """Hash: points of requests and tokens a minute, and when they were counted. `scope`: `limits.ScopedLimits`."""
    return f"rh:{{t:{tenant_id}}}:meters{':' + scope if scope else ''}"


def concurrency_leases(tenant_id: TenantId, scope: str = "") -> str:
    """Sorted set: request id by when its lease runs out, ms."""
    return f"rh:{{t:{tenant_id}}}:leases{':' + scope if scope else ''}"


def ticket(tenant_id: TenantId, request_id: RequestId) -> str:
    """What one admitted request reserved, or that it ended."""
    return f"rh:{{t:{tenant_id}}}:ticket:{request_id}"
