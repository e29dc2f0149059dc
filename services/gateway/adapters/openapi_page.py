"""The OpenAPI page of the public port, made from the live route table and from the structs that parse the bodies.

A route that nobody described here still appears, without words; a test asks for the words. Behind the key like
everything else: it says nothing secret, but the public set stays exactly the two health paths (case B05).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from services.gateway.adapters.http_edge import EdgeRoute
from services.gateway.adapters.openai_batches import BatchBody
from services.gateway.adapters.openai_bodies import ChatBody, CompletionBody, EmbeddingBody

VERSION = "1"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_encode = msgspec.json.Encoder(order="deterministic").encode


class KServeTensor(msgspec.Struct, kw_only=True):
    """An input tensor as JSON; binary tensors follow the JSON in the body (`Inference-Header-Content-Length`)."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class KServeInfer(msgspec.Struct, kw_only=True):
    """Body of an inference."""

    inputs: list[KServeTensor]
    id: str | None = None
    outputs: list[dict[str, Any]] | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """What a route does. `body` is its JSON body's struct; `form` marks an upload."""

    summary: str
    body: type[msgspec.Struct] | None = None
    form: bool = False
    streams: bool = False
    query: tuple[str, ...] = ()


_PAGE = ("limit", "after")
WORDS: dict[tuple[str, str], Words] = {
    ("POST", "/v1/chat/completions"): Words("Chat with the model's own template.", ChatBody, streams=True),
    ("POST", "/v1/completions"): Words("Complete bare prompts.", CompletionBody, streams=True),
    ("POST", "/v1/embeddings"): Words("Embed texts or tokens.", EmbeddingBody),
    ("GET", "/v1/models"): Words("The models and adapters you may call."),
    ("GET", "/v1/models/{model}"): Words("One model or adapter."),
    ("GET", "/v1/files"): Words("Your files.", query=("purpose", "order", *_PAGE)),
    ("POST", "/v1/files"): Words("Upload a file.", form=True),
    ("GET", "/v1/files/{file_id}"): Words("One file."),
    ("DELETE", "/v1/files/{file_id}"): Words("Remove a file."),
    ("GET", "/v1/files/{file_id}/content"): Words("A file's content."),
    ("GET", "/v1/batches"): Words("Your batches.", query=_PAGE),
    ("POST", "/v1/batches"): Words("Start a batch.", BatchBody),
    ("GET", "/v1/batches/{batch_id}"): Words("One batch."),
    ("POST", "/v1/batches/{batch_id}/cancel"): Words("Stop a batch."),
    ("GET", "/health/live"): Words("Whether the process answers; needs no key."),
    ("GET", "/health/ready"): Words("Whether it takes work; needs no key."),
    ("GET", "/v2"): Words("Name and extensions of the server."),
    ("GET", "/v2/health/live"): Words("Whether the server answers."),
    ("GET", "/v2/health/ready"): Words("Whether the server takes work."),
    ("POST", "/v2/repository/index"): Words("Your models and whether a node has them ready."),
    ("POST", "/v2/repository/models/{model}/load"): Words("For operators: refused."),
    ("POST", "/v2/repository/models/{model}/unload"): Words("For operators: refused."),
    ("GET", "/v2/models/stats"): Words("Calls of your models through this gateway."),
    ("GET", "/openapi.json"): Words("This page, for programs."),
    ("GET", "/docs"): Words("This page, for people."),
}
for _prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
    WORDS |= {
        ("GET", _prefix): Words("Inputs and outputs of a model."),
        ("GET", f"{_prefix}/ready"): Words("Whether a node has the model ready."),
        ("GET", f"{_prefix}/stats"): Words("Calls of a model through this gateway."),
        ("POST", f"{_prefix}/infer"): Words("Call a model with tensors.", KServeInfer),
    }


class OpenApiPage:
    """Serves the page. `describe` it once all routes are known."""

    def __init__(self) -> None:
        self._json = b""
        self._html = ""

    def routes(self) -> list[BaseRoute]:
        """The route table."""
        return [
            EdgeRoute("/openapi.json", self.document, methods=["GET"]),
            EdgeRoute("/docs", self.page, methods=["GET"]),
        ]

    def describe(self, routes: Sequence[BaseRoute]) -> None:
        """Make the page of these routes."""
        made = openapi_document(routes)
        self._json, self._html = _encode(made), _page(made)

    async def document(self, request: Request) -> Response:
        """GET /openapi.json."""
        return Response(self._json, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """GET /docs."""
        return HTMLResponse(
            self._html, headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )


def live_operations(routes: Sequence[BaseRoute]) -> list[tuple[str, str]]:
    """Method and path of everything that is served, paths as OpenAPI writes them."""
    found = [
        (method, _PARAMETER.sub(r"{\1}", route.path))
        for route in routes
        if isinstance(route, EdgeRoute)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]
    return sorted(set(found), key=lambda operation: (operation[1], operation[0]))


def openapi_document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the live routes."""
    paths: dict[str, dict[str, Any]] = {}
    operations = live_operations(routes)
    for method, path in operations:
        words = WORDS.get((method, path), Words(""))
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, words)
    bodies = {WORDS[one].body for one in operations if one in WORDS} - {None}
    _, schemas = msgspec.json.schema_components(sorted(bodies, key=repr), ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Roundhouse",
            "version": VERSION,
            "description": "The API for tenants; explained in docs/tenants/api.md. Explicit nulls count as absent.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas, "Error": _ERROR, "KServeError": _KSERVE_ERROR},
        },
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_KSERVE_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _operation(method: str, path: str, words: Words) -> dict[str, Any]:
    error = "KServeError" if path.startswith("/v2") else "Error"
    content: dict[str, Any] = {"application/json": {}}
    if words.streams:
        content["text/event-stream"] = {}
    if path.endswith("/content"):
        content = {"application/octet-stream": {}}
    if path == "/docs":
        content = {"text/html": {}}
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', path.lower())}",
        "summary": words.summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            "4XX": _refusal("The request is refused.", error),
            "5XX": _refusal("The request failed.", error),
        },
    }
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in _PARAMETER.findall(path)
    ]
    parameters += [{"name": name, "in": "query", "schema": text} for name in words.query]
    if parameters:
        described["parameters"] = parameters
    if words.body is not None:
        schema: dict[str, Any] = {"$ref": _REF.format(name=words.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if words.form:
        schema = {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
        }
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return described


def _refusal(description: str, schema: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": _REF.format(name=schema)}}},
    }


def _page(document: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(method.upper())}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation['summary'])}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    title = escape(document["info"]["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font-family:sans-serif;margin:2em}td{padding:.2em 1em .2em 0}</style>"
        f"<h1>{title}</h1><p>{escape(document['info']['description'])}</p><table>{rows}</table></html>"
    )
