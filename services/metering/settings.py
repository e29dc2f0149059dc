"""What metering needs to know, from the environment."""

from pydantic import Field

from roundhouse.environment import ServiceSettings


class MeteringSettings(ServiceSettings):
    """Settings of metering."""

    ledger_url: str = Field(
        default="sqlite:///.roundhouse/ledger.sqlite3", description="sqlite:///FILE or postgresql://user@host/database"
    )
    http_port: int = Field(default=8090, ge=0, le=65535, description="usage queries; internal, knows no keys")
