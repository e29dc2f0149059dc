"""Settings of the gateway. Read once at start; see `roundhouse.environment`."""

from pydantic import Field

from roundhouse.environment import ServiceSettings


class GatewaySettings(ServiceSettings):
    """What a gateway needs to know."""

    http_port: int = Field(default=8080, ge=0, le=65535, description="OpenAI and KServe v2 REST; 0 picks a free port")
    grpc_port: int = Field(default=8081, ge=0, le=65535, description="KServe v2 gRPC; 0 picks a free port")
    admin_port: int = Field(default=8082, ge=0, le=65535, description="admin API; 0 picks a free port")
    admin_key_hash: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of the bootstrap admin key, hex; empty = none"
    )
    metering_url: str = Field(default="", description="http://host:port of metering's query API; empty = no usage API")
    catalogue_file: str = Field(default="", description="catalogue to apply at start; empty = none")
    body_bytes_max: int = Field(default=32 * 1024 * 1024, ge=1024, description="longest request body, bytes")
    deadline_ms: int = Field(default=120_000, ge=1, description="time a request may take when it names none, ms")
    outbox_dir: str = Field(
        default=".roundhouse/outbox", description="folder of usage events until the stream has them; on a local disk"
    )
    outbox_events_max: int = Field(
        default=50_000, ge=1, description="usage events that may wait; then new requests are refused with 503"
    )
