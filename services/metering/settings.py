"""What metering needs to know, from the environment."""

from pathlib import Path

from pydantic import Field

from roundhouse.environment import ServiceSettings


class MeteringSettings(ServiceSettings):
    """Settings of metering."""

    ledger_url: str = Field(
        default="sqlite:///.roundhouse/ledger.sqlite3", description="sqlite:///FILE or postgresql://user@host/database"
    )
    http_port: int = Field(default=8090, ge=0, le=65535, description="usage queries; internal, knows no keys")
    grpc_port: int = Field(
        default=0, ge=0, le=65535, description="usage queries over gRPC; internal, knows no keys; 0 picks a free port"
    )
    webhook_private_addresses: bool = Field(
        default=False, description="let webhooks go to private addresses and over http; for development"
    )
    signing_key_file: str = Field(
        default="", description="Ed25519 key (PEM) that signs closed periods; empty: made beside a SQLite ledger"
    )

    def signing_key_path(self) -> Path:
        """Where the signing key is. A PostgreSQL ledger has no folder, so there the default is `.roundhouse`."""
        if self.signing_key_file:
            return Path(self.signing_key_file)
        if self.ledger_url.startswith("sqlite:///"):
            return Path(self.ledger_url.removeprefix("sqlite:///")).absolute().with_suffix(".signing.pem")
        return Path(".roundhouse/metering.signing.pem").absolute()
