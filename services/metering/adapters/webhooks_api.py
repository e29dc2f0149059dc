"""Webhook endpoints over HTTP, for operators. A secret is shown once, when the endpoint is made."""

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound
from services.metering.adapters.accounts_api import read_body
from services.metering.domain.periods import instant_text
from services.metering.domain.webhooks import SECRET_BYTES, Endpoint, secret_bytes, secret_text
from services.metering.money_ports import WebhookPoster, WebhookStore


class EndpointBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/webhooks. `from_sequence` 0: only what is recorded from now on."""

    url: str
    tenant: str = ""
    secret: str = ""
    from_sequence: int = 0


class AgainBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/webhooks/{id}/again."""

    from_sequence: int


@dataclass(frozen=True, slots=True)
class WebhookServices:
    """What this part of the API works with."""

    store: WebhookStore
    poster: WebhookPoster
    clock: Clock


def webhooks_router(services: WebhookServices) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/v1/webhooks", summary="Endpoints, and how far each is")
    async def list_endpoints() -> Response:
        head = await services.store.head()
        return JSONResponse({"webhooks": [endpoint_json(found, head) for found in await services.store.endpoints()]})

    @router.post("/v1/webhooks", summary="Add an endpoint")
    async def add(request: Request) -> Response:
        return await _add(services, await read_body(request, EndpointBody))

    @router.delete("/v1/webhooks/{endpoint_id}", summary="Remove an endpoint")
    async def remove(endpoint_id: str) -> Response:
        _found(await services.store.remove(endpoint_id))
        return JSONResponse({"removed": endpoint_id})

    @router.get("/v1/webhooks/{endpoint_id}/dead", summary="Records that an endpoint did not take")
    async def dead(endpoint_id: str) -> Response:
        found = await services.store.dead(endpoint_id)
        shown = [
            {"sequence": item.sequence, "reason": item.reason, "failed": instant_text(item.failed_ms)} for item in found
        ]
        return JSONResponse({"dead": shown})

    @router.post("/v1/webhooks/{endpoint_id}/again", summary="Send everything from a sequence on again")
    async def again(endpoint_id: str, request: Request) -> Response:
        body = await read_body(request, AgainBody)
        if body.from_sequence < 1:
            raise InvalidInput("sequences begin at 1", param="from_sequence")
        _found(await services.store.send_again(endpoint_id, body.from_sequence))
        return JSONResponse({"webhook": endpoint_id, "from_sequence": body.from_sequence})

    return router


async def _add(services: WebhookServices, body: EndpointBody) -> Response:
    fault = services.poster.fault_of(body.url)
    if fault is not None:
        raise InvalidInput(f"this address cannot be used: {fault}", param="url")
    secret = body.secret or secret_text(secrets.token_bytes(SECRET_BYTES))
    try:
        secret_bytes(secret)
    except ValueError as error:
        raise InvalidInput(str(error), param="secret") from error
    head = await services.store.head()
    endpoint = Endpoint(
        endpoint_id=f"wh-{secrets.token_hex(6)}",
        url=body.url,
        secret=secret,
        tenant_id=body.tenant,
        sequence=max(body.from_sequence - 1, 0) if body.from_sequence else head,
        created_ms=services.clock.now_ms(),
    )
    await services.store.add(endpoint)
    return JSONResponse({**endpoint_json(endpoint, head), "secret": secret}, status_code=201)


def endpoint_json(endpoint: Endpoint, head: int) -> dict[str, Any]:
    """An endpoint without its secret."""
    return {
        "id": endpoint.endpoint_id,
        "url": endpoint.url,
        "tenant": endpoint.tenant_id,
        "state": "active" if endpoint.active else "disabled",
        "sequence": endpoint.sequence,
        "behind": max(0, head - endpoint.sequence),
        "attempts": endpoint.attempts,
        "next": instant_text(endpoint.next_ms) if endpoint.next_ms else None,
        "last_error": endpoint.last_error,
        "created": instant_text(endpoint.created_ms),
    }


def _found(found: bool) -> None:
    if not found:
        raise NotFound("there is no such webhook", code="webhook_not_found")
