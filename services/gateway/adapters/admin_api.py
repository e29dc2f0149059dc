"""The operators' HTTP API, under /admin/v1: catalogue, keys, usage, nodes, models.

On a port of its own, behind the same edge as the callers' API: nothing is answered without a key, and here every key is
checked against the store on every call, so that a revoked admin key opens nothing (case B06). Every route but usage
wants the `admin` scope; usage also lets a tenant's key read that tenant's usage (invariant 16). Errors have the shape
of the OpenAI error object. Contract: docs/operators/keys.md and docs/operators/catalogue.md.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from roundhouse.catalogue.problems import DeclarationRefused
from roundhouse.catalogue.records import Pin, ScopeLimits
from roundhouse.catalogue.store import CatalogueView
from roundhouse.catalogue.yaml_document import BYTES_MAX
from roundhouse.clock import Clock
from roundhouse.errors import Forbidden, InvalidInput, NotFound
from roundhouse.vocabulary import KeyId
from services.gateway.adapters import admin_json
from services.gateway.adapters.admin_forecasts import BusForecasts
from services.gateway.adapters.admin_metering import MeteringProxy
from services.gateway.adapters.http_edge import EdgeRoute, HttpEdge, router
from services.gateway.adapters.http_errors import error_headers, http_status, openai_error
from services.gateway.adapters.http_requests import RequestReader
from services.gateway.domain import keys
from services.gateway.operations.admin_maintenance import MaintenanceOperations
from services.gateway.operations.admin_models import ModelOperations, ModelPlace
from services.gateway.operations.admin_ports import NodeStates, UsageQueries
from services.gateway.operations.apply import CatalogueApplication, Declared
from services.gateway.operations.erase_cache import CacheErasure
from services.gateway.operations.erase_stored import StoredErasure
from services.gateway.operations.keys import KeyOperations, KeyWish
from services.gateway.ports import Caller, KeyDirectory

PREFIX = "/admin/v1"
BODY_BYTES_MAX = 2 * BYTES_MAX  # a declaration inside JSON, where quotes and line ends take two bytes
KINDS = ("tenants", "models", "adapters", "sharing_groups")

_encode = msgspec.json.Encoder().encode
Body = TypeVar("Body")
Handler = Callable[[Request, Caller], Awaitable[Response]]


class ApplyBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/catalogue."""

    text: str
    file_name: str = "catalogue.yaml"
    base_dir: str = "."
    dry_run: bool = False


class KeyBudget(msgspec.Struct, forbid_unknown_fields=True):
    """What may be spent with one key in a period."""

    amount: str  # decimal
    currency: str = "USD"
    period: str = "month"


class KeyLimits(msgspec.Struct, forbid_unknown_fields=True):
    """Limits of one key, beside its tenant's; what is left out is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    queued_tokens: int | None = None
    budget: KeyBudget | None = None


class KeyBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/keys."""

    tenant: str = ""
    scopes: tuple[str, ...] = (keys.INFERENCE,)
    expires_in_s: int | None = None
    label: str = ""
    limits: KeyLimits | None = None


class RotateBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/keys/{key_id}/rotate. The old key works `overlap_s` longer."""

    overlap_s: int = 24 * 3600


class ModelBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/models/{name}/load and /unload. `node` empty: the best one, or all that have it."""

    node: str = ""


class StageBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/models/{name}/stage. `node` empty: the best one."""

    node: str = ""
    tier: str = "host"


class PinBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/models/{name}/pin. So many instances stand ready at all times, and none leaves for another."""

    min_replicas: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/v1/nodes/{node}/drain."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class AdminServices:
    """What the admin API works with."""

    directory: KeyDirectory
    catalogue: CatalogueView
    applying: CatalogueApplication
    keys: KeyOperations
    models: ModelOperations
    maintenance: MaintenanceOperations
    forecasts: BusForecasts
    nodes: NodeStates
    usage: UsageQueries
    clock: Clock
    erasing: CacheErasure
    stored: StoredErasure
    metering: MeteringProxy


def admin_app(services: AdminServices) -> ASGIApp:
    """The ASGI app; serve it on the admin port."""

    async def identify(key_text: str) -> Caller:
        return await services.directory.identify(key_text, fresh=True)

    api = _AdminApi(services)
    routes = [
        _route("POST", "/catalogue", _for_operators(api.apply)),
        _route("GET", "/catalogue", _for_operators(api.show_catalogue)),
        _route("POST", "/keys", _for_operators(api.create_key)),
        _route("GET", "/keys", _for_operators(api.list_keys)),
        _route("DELETE", "/keys/{key_id}", _for_operators(api.revoke_key)),
        _route("POST", "/keys/{key_id}/rotate", _for_operators(api.rotate_key)),
        _route("GET", "/usage", api.show_usage),
        *(_route(method, "/metering/{path:path}", services.metering.forward) for method in ("GET", "POST", "DELETE")),
        _route("GET", "/nodes", _for_operators(api.list_nodes)),
        _route("POST", "/tenants/{tenant}/erase-cache", _for_operators(api.erase_cache)),
        _route("POST", "/tenants/{tenant}/erase-stored", _for_operators(api.erase_stored)),
        _route("POST", "/models/{name}/load", _for_operators(api.load_model)),
        _route("POST", "/models/{name}/stage", _for_operators(api.stage_model)),
        _route("POST", "/models/{name}/pin", _for_operators(api.pin_model)),
        _route("POST", "/models/{name}/unpin", _for_operators(api.unpin_model)),
        _route("POST", "/nodes/{node}/drain", _for_operators(api.drain_node)),
        _route("POST", "/nodes/{node}/resume", _for_operators(api.resume_node)),
        _route("POST", "/models/{name}/unload", _for_operators(api.unload_model)),
        _route("GET", "/models/{name}/forecast", _for_operators(api.forecast_model)),
    ]
    return HttpEdge(router(_merged(routes)), identify)


class _AdminApi:
    def __init__(self, services: AdminServices) -> None:
        self._services = services
        self._reader = RequestReader(services.clock, body_bytes_max=BODY_BYTES_MAX, deadline_ms=0)

    async def apply(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, ApplyBody)
        declared = Declared(body.text, body.file_name, _absolute(body.base_dir))
        try:
            applied = await self._services.applying.apply(declared, actor=caller.key_id, dry_run=body.dry_run)
        except DeclarationRefused as refused:
            content = {**openai_error(refused), "problems": admin_json.problems_json(refused)}
            return _json(content, status=http_status(refused), headers=error_headers(refused))
        return _json(admin_json.applied_json(applied))

    async def show_catalogue(self, request: Request, _: Caller) -> Response:
        current, kind = self._services.catalogue.current, request.query_params.get("kind")
        if kind is None:
            return _json(msgspec.to_builtins(current))
        if kind not in KINDS:
            raise InvalidInput(f"must be one of {', '.join(KINDS)}", param="kind")
        items: dict[str, msgspec.Struct] = getattr(current, kind)
        name = request.query_params.get("name")
        if name is None:
            return _json({"generation": current.generation, kind: list(items.values()), "pins": current.pins})
        if name not in items:
            one = kind.removesuffix("s")
            raise NotFound(f"there is no {one.replace('_', ' ')} `{name}`", code=f"{one}_not_found")
        return _json({"generation": current.generation, kind: [items[name]]})

    async def create_key(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, KeyBody)
        limits = None if body.limits is None else msgspec.convert(msgspec.to_builtins(body.limits), ScopeLimits)
        wish = KeyWish(body.tenant, body.scopes, body.expires_in_s, body.label, limits)
        made = await self._services.keys.create(wish, actor=caller.key_id)
        shown = admin_json.key_json(made.record, self._services.keys.state_of(made.record))
        return _json({"key": made.text, **shown}, status=201, headers={"cache-control": "no-store"})

    async def rotate_key(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, RotateBody)
        operations, key_id = self._services.keys, KeyId(request.path_params["key_id"])
        rotation = await operations.rotate(key_id, overlap_s=body.overlap_s, actor=caller.key_id)
        made, old = rotation.new.record, rotation.old
        shown = admin_json.key_json(made, operations.state_of(made))
        ending = admin_json.key_json(old, operations.state_of(old))
        content = {"key": rotation.new.text, **shown, "old": ending}
        return _json(content, status=201, headers={"cache-control": "no-store"})

    async def list_keys(self, request: Request, _: Caller) -> Response:
        operations = self._services.keys
        records = await operations.all(request.query_params.get("tenant"))
        return _json({"keys": [admin_json.key_json(record, operations.state_of(record)) for record in records]})

    async def revoke_key(self, request: Request, caller: Caller) -> Response:
        operations = self._services.keys
        record = await operations.revoke(KeyId(request.path_params["key_id"]), actor=caller.key_id)
        return _json(admin_json.key_json(record, operations.state_of(record)))

    async def show_usage(self, request: Request, caller: Caller) -> Response:
        parameters = dict(request.query_params)
        if keys.ADMIN not in caller.scopes:
            if not caller.scopes & {keys.USAGE_READ, keys.INFERENCE}:
                raise Forbidden("This key may not read usage.")
            if parameters.get("tenant", caller.tenant_id) != caller.tenant_id:
                raise Forbidden("This key may read its own tenant's usage only.", param="tenant")
            parameters["tenant"] = caller.tenant_id
        return _json(await self._services.usage.usage(parameters))

    async def list_nodes(self, _: Request, __: Caller) -> Response:
        return _json({"nodes": [admin_json.node_json(state) for state in await self._services.nodes.all()]})

    async def erase_cache(self, request: Request, caller: Caller) -> Response:
        outcomes = await self._services.erasing.erase(request.path_params["tenant"], actor=caller.key_id)
        return _json(admin_json.erasure_json(outcomes))

    async def erase_stored(self, request: Request, caller: Caller) -> Response:
        erased = await self._services.stored.erase(request.path_params["tenant"], actor=caller.key_id)
        return _json({"answers": erased.answers, "files_and_batches": erased.files_and_batches})

    async def load_model(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, ModelBody)
        name = request.path_params["name"]
        place = await self._services.models.load(name, body.node or None, actor=caller.key_id)
        return _json({"model": name, "nodes": _places([place], "loaded")})

    async def stage_model(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, StageBody)
        name = request.path_params["name"]
        place = await self._services.models.stage(name, body.node or None, body.tier, actor=caller.key_id)
        return _json({"model": name, "nodes": _places([place], "staged")})

    async def pin_model(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, PinBody)
        pin = Pin(min_replicas=body.min_replicas)
        applied = await self._services.applying.pin(request.path_params["name"], pin, actor=caller.key_id)
        return _json(admin_json.applied_json(applied))

    async def unpin_model(self, request: Request, caller: Caller) -> Response:
        applied = await self._services.applying.pin(request.path_params["name"], None, actor=caller.key_id)
        return _json(admin_json.applied_json(applied))

    async def drain_node(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, DrainBody)
        node = request.path_params["node"]
        await self._services.maintenance.drain(node, body.reason, actor=caller.key_id)
        return _json({"node": node, "draining": True})

    async def resume_node(self, request: Request, caller: Caller) -> Response:
        node = request.path_params["node"]
        await self._services.maintenance.resume(node, actor=caller.key_id)
        return _json({"node": node, "draining": False})

    async def unload_model(self, request: Request, caller: Caller) -> Response:
        body = await self._body(request, ModelBody)
        name = request.path_params["name"]
        places = await self._services.models.unload(name, body.node or None, actor=caller.key_id)
        return _json({"model": name, "nodes": _places(places, "unloaded")})

    async def forecast_model(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["name"]
        return _json({"model": name, **await self._services.forecasts.of(name)})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        data = await self._reader.body(request)
        try:
            return msgspec.json.decode(data or b"{}", type=kind)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"the body is not what this takes: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput("the body is not JSON") from error


def _for_operators(handler: Handler) -> Handler:
    async def checked(request: Request, caller: Caller) -> Response:
        if keys.ADMIN not in caller.scopes:
            raise Forbidden("This needs an admin key.")
        return await handler(request, caller)

    return checked


@dataclass(frozen=True, slots=True)
class _Route:
    method: str
    path: str
    handler: Handler


def _route(method: str, path: str, handler: Handler) -> _Route:
    return _Route(method, PREFIX + path, handler)


def _merged(routes: list[_Route]) -> list[EdgeRoute]:
    """One route a path: the first match decides, so the methods of a path must be together."""
    by_path: dict[str, dict[str, Handler]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route.handler
    return [EdgeRoute(path, _by_method(handlers), methods=list(handlers)) for path, handlers in by_path.items()]


def _by_method(handlers: dict[str, Handler]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        handler = handlers["GET" if request.method == "HEAD" else request.method]
        return await handler(request, request.scope["state"]["caller"])

    return endpoint


def _places(places: list[ModelPlace], done: str) -> list[dict[str, Any]]:
    return [{"node": place.node_id, done: place.changed} for place in places]


def _absolute(base_dir: str) -> Path:
    path = Path(base_dir)
    if not path.is_absolute() or "\0" in base_dir:
        raise InvalidInput("must be an absolute path", param="base_dir")
    return path


def _json(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(content), status_code=status, headers=headers, media_type="application/json")
