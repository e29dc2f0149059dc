"""Which model a name means for a caller. What a tenant may not see looks like what is not there (invariant 16)."""

from dataclasses import dataclass

from roundhouse.catalogue.records import Adapter, Model, Tenant
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import NotFound, Unauthenticated
from roundhouse.vocabulary import RequestId
from services.gateway.ports import Caller

_READING_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
NAME_CHARACTERS_SHOWN = 100  # a guess: enough to see a typing error, short enough for a log


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What an edge knows of a request besides its body."""

    request_id: RequestId
    caller: Caller
    deadline_unix_ms: int
    fallback: bool | None = None  # whether a smaller model may answer; None = as the tenant's setting says


def resolve_model(catalogue: CatalogueView, caller: Caller, name: str) -> tuple[Tenant, Model, Adapter | None]:
    """Tenant, model and adapter behind a name. Raises NotFound alike for what is not there and what may not be seen."""
    current = catalogue.current
    tenant = current.tenants.get(caller.tenant_id)
    if tenant is None:
        raise Unauthenticated("the API key is not valid")
    found = current.resolve(caller.tenant_id, name)
    if found is None:
        raise NotFound(model_not_found_text(name), param="model")
    return tenant, *found


def model_not_found_text(name: str) -> str:
    """The one text for every model that a tenant cannot call."""
    shown = name if len(name) <= NAME_CHARACTERS_SHOWN else name[:NAME_CHARACTERS_SHOWN] + "…"
    return f"The model '{shown}' does not exist or you do not have access to it."


def reads_alike(one: Model, other: Model) -> bool:
    """Whether a prompt of one version is the same token ids for the other: tokenizer and template are the same."""
    return _reading(one) == _reading(other)


def _reading(model: Model) -> tuple[object, ...]:
    if model.tokenizer_path != model.source_path:
        return model.interface, model.tokenizer_path
    return model.interface, *sorted((file.name, file.sha256) for file in model.files if file.name in _READING_FILES)
