"""The shape of a declaration, key by key: types, defaults and bounds. What names refer to is checked in `declaration`.

Strict: nothing is converted silently, an unknown key is an error. The words are those of docs/operators/catalogue.md.
"""

import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from roundhouse.catalogue.lora_format import RANK_MAX
from roundhouse.catalogue.records import is_address

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
COUNT_MAX = 1_000_000_000  # keeps the limit arithmetic of admission.lua exact (services/gateway/domain/limits.py)
LLM_ENGINES = ("reference", "vllm")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)")


def _bytes_of(value: object) -> object:
    """`auto` stays; "64MiB" and whole numbers become bytes."""
    if value == "auto" or isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2] not in _UNITS:
        raise ValueError("must be `auto` or a size such as 64MiB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _money(value: object) -> str:
    """A decimal as text, exactly as written: amounts are never floats."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be an amount such as 0.15")
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        raise ValueError("must be an amount such as 0.15") from None
    if not amount.is_finite() or amount < 0:
        raise ValueError("must be an amount that is not negative")
    if amount > COUNT_MAX or amount != round(amount, 12):
        raise ValueError(f"must be at most {COUNT_MAX} with at most 12 decimals")
    return format(amount, "f")


def _no_nul(value: str) -> str:
    if "\0" in value or not value.strip():
        raise ValueError("must be a path")
    return value


def _below(value: str) -> str:
    """A name that stays below its folder."""
    if {"", ".", ".."} & set(value.split("/")) or "\0" in value or len(value) > 255:
        raise ValueError("must be a name below the address, such as config.json")
    return value


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Pattern = Annotated[str, Field(min_length=1, max_length=128)]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, Field(ge=1, le=COUNT_MAX)]
Size = Annotated[Any, BeforeValidator(_bytes_of)]
Money = Annotated[Any, BeforeValidator(_money)]
FilePath = Annotated[str, AfterValidator(_no_nul)]
Currency = Annotated[str, Field(pattern=r"^[A-Z]{3}$")]


class Shape(BaseModel):
    """A map with known keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LimitsShape(Shape):
    """Limits of a tenant; a missing key is no limit, but what is queued is always limited."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    queued_requests: Count = 256  # a guess: a minute of work for one busy instance
    queued_tokens: Positive = 2_000_000  # input + allowed output; a guess: 256 long requests


class BudgetShape(Shape):
    """What may be spent."""

    amount: Money
    currency: Currency = "USD"
    period: Literal["day", "month"] = "month"


class ScopeLimitsShape(Shape):
    """Limits on one model; a missing key is no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    queued_requests: Count | None = None
    queued_tokens: Positive | None = None
    budget: BudgetShape | None = None


class ModelLimitsShape(ScopeLimitsShape):
    """Limits of a tenant on the models and adapters whose names match."""

    model: Pattern


class PriceShape(Shape):
    """Per million tokens."""

    id: Name | None = None
    input: Money = "0"
    cached_input: Money = "0"
    output: Money = "0"
    currency: Currency = "USD"


def _instant(value: object) -> int:
    """A date (its start in UTC) or an RFC 3339 time with an offset, as Unix milliseconds."""
    if type(value) is date:
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value if len(value) > len("2026-01-31") else f"{value}T00:00:00+00:00")
        except ValueError:
            raise ValueError("must be a date or an RFC 3339 time") from None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError("must be a date, or an RFC 3339 time with an offset such as 2026-12-01T00:00:00Z")
    return (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


Instant = Annotated[Any, BeforeValidator(_instant)]


class DatedPriceShape(PriceShape):
    """A further price: of one class, or from an instant on, or both."""

    priority_class: Literal["interactive", "standard", "batch"] | None = Field(default=None, alias="class")
    effective_from: Instant | None = Field(default=None, alias="from")


class TenantShape(Shape):
    """A customer."""

    name: Name
    weight: float = Field(default=1.0, gt=0, le=1_000, allow_inf_nan=False)
    priority_class: Literal["interactive", "standard", "batch"] = Field(default="standard", alias="class")
    limits: LimitsShape = LimitsShape()
    budget: BudgetShape | None = None
    isolation: Name = "shared"  # or one of the words in `records`, or a pool of this tenant's own
    fallback: bool = False
    models: list[Pattern] = Field(default_factory=lambda: ["*"])
    usage_retention_days: Positive | None = None
    limits_per_model: list[ModelLimitsShape] = Field(default_factory=list)
    sharing_group: Name | None = None


class ContentFileShape(Shape):
    """One file at an address."""

    name: Annotated[str, AfterValidator(_below)]
    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SourceShape(Shape):
    """Where files lie: a path, relative to the declaration's folder, or an address with a scheme and its files."""

    path: FilePath
    files: list[ContentFileShape] = Field(default_factory=list)

    @property
    def is_address(self) -> bool:
        """Whether loaders fetch it from a server; else it is a path that they see."""
        return is_address(self.path)


class MemoryShape(Shape):
    """What an instance takes of a device."""

    device: Size = "auto"
    kv_pool_tokens: Count | None = None


class SloShape(Shape):
    """What callers are promised."""

    time_to_first_token_ms: Positive = 2_000
    cold_start_ms: Positive = 60_000


class ResidencyShape(Shape):
    """How a model stays on devices."""

    pinned: bool = False
    min_replicas: Annotated[int, Field(ge=0, le=1_024)] = 0


class AccessShape(Shape):
    """Who may see a model; `*` is everybody."""

    tenants: list[Pattern] = Field(default_factory=lambda: ["*"])


class ModelShape(Shape):
    """A model with its current version."""

    name: Name
    source: SourceShape
    engine: Literal["reference", "onnx", "vllm", "triton"]
    interface: Literal["llm", "tensors"] | None = None
    slots: Annotated[int, Field(ge=1, le=1_024)] = 4
    memory: MemoryShape = MemoryShape()
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    adapter_slots: Annotated[int, Field(ge=0, le=256)] = 0
    adapter_rank_max: Annotated[int, Field(ge=1, le=RANK_MAX)] = 16
    fallback: Name | None = None
    context_tokens: Positive | None = None
    tokenizer: FilePath | None = None
    pool: Name = "shared"
    slo: SloShape = SloShape()
    residency: ResidencyShape = ResidencyShape()
    access: AccessShape = AccessShape()
    price: PriceShape | None = None
    prices: list[DatedPriceShape] = Field(default_factory=list)
    tenant_limits: ScopeLimitsShape | None = None


def interface_of(model: ModelShape) -> str:
    """How a model is called if the file does not say."""
    return model.interface or ("llm" if model.engine in LLM_ENGINES else "tensors")


class AdapterShape(Shape):
    """LoRA weights over a base model."""

    name: Name
    base: Name
    source: SourceShape
    base_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    tenant: Name | None = None
    price: PriceShape | None = None
    prices: list[DatedPriceShape] = Field(default_factory=list)


class SharingGroupShape(Shape):
    """Who shares the cache of which beginnings of prompts."""

    name: Name
    tenants: list[Name] = Field(min_length=1)
    prompts: list[Annotated[str, Field(min_length=1, max_length=65_536)]] = Field(min_length=1, max_length=16)


class FileShape(Shape):
    """The whole file; its items are checked one by one, so that one bad item hides no other."""

    version: Literal[1]
    tenants: list[Any] = Field(default_factory=list)
    models: list[Any] = Field(default_factory=list)
    adapters: list[Any] = Field(default_factory=list)
    sharing_groups: list[Any] = Field(default_factory=list)
