"""What loaders are told, from version keys."""

from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.scheduler.domain.records import VersionKey, digest_of, model_of


def wire_version(version: VersionKey) -> vocabulary_pb2.ModelVersion:
    """The version as loaders and the catalogue name it: without its owner, which is ours alone."""
    return vocabulary_pb2.ModelVersion(model=model_of(version), digest=digest_of(version))


def unload_order(
    version: VersionKey, now_ms: int, *, deadline_ms: int, reason: str
) -> loading_pb2.EnsureUnloadedRequest:
    """The order to unload a version, as of now; the newest order of a version wins."""
    return loading_pb2.EnsureUnloadedRequest(
        version=wire_version(version), generation=now_ms, deadline_ms=deadline_ms, reason=reason
    )
