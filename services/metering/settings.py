"""What metering needs to know, from the environment."""

from decimal import Decimal, InvalidOperation
from pathlib import Path

from pydantic import Field, field_validator

from roundhouse.environment import ServiceSettings


class MeteringSettings(ServiceSettings):
    """Settings of metering."""

    ledger_url: str = Field(
        default="sqlite:///.roundhouse/ledger.sqlite3", description="sqlite:///FILE or postgresql://user@host/database"
    )
    engine_metrics_urls: str = Field(
        default="", description="metrics pages of the Triton servers, with spaces between; empty: not compared"
    )
    http_port: int = Field(default=8090, ge=0, le=65535, description="usage queries; internal, knows no keys")
    grpc_port: int = Field(
        default=0, ge=0, le=65535, description="usage queries over gRPC; internal, knows no keys; 0 picks a free port"
    )
    webhook_private_addresses: bool = Field(
        default=False, description="let webhooks go to private addresses and over http; for development"
    )
    node_hour_costs: str = Field(
        default="", description="what a node-hour costs, by pool: shared=2.50,gold=4.10; *=1 is for every other pool"
    )
    cost_currency: str = Field(default="USD", pattern="^[A-Z]{3}$", description="currency of node_hour_costs")
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

    @field_validator("node_hour_costs")
    @classmethod
    def _costs_are_amounts(cls, text: str) -> str:
        rates_of(text)
        return text


def rates_of(text: str) -> dict[str, Decimal]:
    """Price of a node-hour by pool. Raises ValueError, naming the part that is wrong."""
    rates: dict[str, Decimal] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        pool, _, amount = part.rpartition("=")
        try:
            rate = Decimal(amount)
        except InvalidOperation:
            raise ValueError(f"{part!r} is not POOL=AMOUNT") from None
        if not pool or not rate.is_finite() or rate < 0:
            raise ValueError(f"{part!r} is not POOL=AMOUNT")
        rates[pool] = rate
    return rates
