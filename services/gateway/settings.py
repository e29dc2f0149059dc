"""Settings of the gateway. Read once at start; see `roundhouse.environment`."""

from typing import Literal

from pydantic import Field

from roundhouse.environment import ServiceSettings

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]


class GatewaySettings(ServiceSettings):
    """What a gateway needs to know."""

    http_port: int = Field(default=8080, ge=0, le=65535, description="OpenAI and KServe v2 REST; 0 picks a free port")
    grpc_port: int = Field(default=8081, ge=0, le=65535, description="KServe v2 gRPC; 0 picks a free port")
    admin_port: int = Field(default=8082, ge=0, le=65535, description="admin API; 0 picks a free port")
    http2_port: int = Field(
        default=-1, ge=-1, le=65535, description="the same over HTTP/2; 0 picks a free port, -1 = none"
    )
    workers: int = Field(default=1, ge=1, le=64, description="processes that share the ports; see docs/operators")
    reuse_port: bool = Field(default=False, description="let other gateways of this machine share the ports")
    tls_cert: str = Field(default="", description="PEM certificate chain of all ports but the ops port; empty = no TLS")
    tls_key: str = Field(default="", description="PEM key of the certificate")
    tls_client_ca: str = Field(default="", description="PEM CAs; clients must then show a certificate of theirs (mTLS)")
    cors_origins: tuple[str, ...] = Field(
        default=(), description='origins whose pages may call, a JSON list; ["*"] = all, empty = CORS is off'
    )
    head_seconds: float = Field(default=10.0, gt=0, description="time for the head of a request")
    body_seconds: float = Field(default=30.0, gt=0, description="time for a body, and a second more for each 16 kB")
    admin_key_hash: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of the bootstrap admin key, hex; empty = none"
    )
    jwt_issuer: str = Field(default="", description="OIDC issuer whose tokens are taken beside keys; empty = none")
    jwt_audience: str = Field(default="roundhouse", min_length=1, description="what a token's `aud` must hold")
    jwt_jwks_url: str = Field(default="", description="the issuer's key set; empty = by OpenID Connect discovery")
    jwt_algorithms: tuple[Algorithm, ...] = Field(
        default=("RS256", "ES256"), description="signature algorithms that are believed, a JSON list"
    )
    jwt_tenant_claim: str = Field(default="tenant", description="claim with the tenant; dots go into objects")
    jwt_scope_claim: str = Field(default="scope", description="claim with scopes: words in a string, or a list")
    jwt_scopes: dict[str, Literal["inference", "usage:read", "admin"]] | None = Field(
        default=None,
        description="issuer's word → scope, a JSON object; empty = inference and usage:read",
    )
    jwt_leeway_seconds: int = Field(default=30, ge=0, le=300, description="how far the issuer's clock may be off")
    metering_url: str = Field(default="", description="http://host:port of metering's query API; empty = no usage API")
    metering_grpc: str = Field(
        default="", description="host:port of metering's gRPC API; empty = `roundhouse.v1.Metering` answers UNAVAILABLE"
    )
    catalogue_file: str = Field(default="", description="catalogue to apply at start; empty = none")
    body_bytes_max: int = Field(default=32 * 1024 * 1024, ge=1024, description="longest request body, bytes")
    batch_workers: int = Field(default=4, ge=0, le=64, description="batches that this gateway runs at a time; 0 = none")
    file_bytes_max: int = Field(default=200 * 1024 * 1024, ge=1024, description="longest file of /v1/files, bytes")
    tenant_file_bytes_max: int = Field(default=2 * 1024**3, ge=1024, description="all files of one tenant, bytes")
    deadline_ms: int = Field(default=120_000, ge=1, description="time a request may take when it names none, ms")
    outbox_dir: str = Field(
        default=".roundhouse/outbox", description="folder of usage events until the stream has them; on a local disk"
    )
    outbox_events_max: int = Field(
        default=50_000, ge=1, description="usage events that may wait; then new requests are refused with 503"
    )
