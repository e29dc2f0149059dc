"""Nobody passes without a key: every route, every spelling, every method of the gRPC service (case B05)."""

import asyncio
import http.client
import re
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from services.gateway.adapters.http_edge import EdgeRoute
from services.gateway.adapters.kserve_grpc import SERVICE
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/m",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/repository/index",
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
    "/v2/models/m",
    "/v2/models/m/ready",
    "/v2/models/m/infer",
    "/v2/models/m/versions/1/infer",
)
SPELLINGS = (
    *("/v1/chat/completions/", "//v1/chat/completions", "/V1/chat/completions", "/v1%2Fchat%2Fcompletions"),
    *(
        "/v1/./chat/completions",
        "/health/../v1/models",
        "/health/live/../../v1/models",
        "/health/live/",
        "//health/live",
    ),
    *("/health/live%2f..%2f..%2fv1/models", "/metrics", "/docs", "/openapi.json", "/redoc", "/", "/admin/v1/keys"),
    *("/v2/models/m/infer;/health/live", "/health/live?x=/v1/models#", "/health", "//health/live"),
)
PUBLIC = {("/health/live", "GET"), ("/health/ready", "GET"), ("/health/live", "HEAD"), ("/health/ready", "HEAD")}


def status(gateway: RunningGateway, method: str, path: str, key: str | None = None) -> int:
    """The status of one call, sent exactly as written."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.addresses.http, timeout=60)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("content-length", "2")
        if key is not None:
            connection.putheader("authorization", f"Bearer {key}")
        connection.endheaders(b"{}")
        return connection.getresponse().status
    finally:
        connection.close()


async def test_every_live_route_is_guarded(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B05: the route table itself is walked, so that a route that is added is a route that is tested.

    Without a key and with a wrong one every method of every route is 401; a walk with the key finds the routes."""
    routes = [route for route in gateway.addresses.routes if isinstance(route, EdgeRoute)]
    assert len(routes) == len(gateway.addresses.routes) > 15
    for route in routes:
        path = re.sub(r"{[^}]*}", "x", route.path)
        for method in sorted(route.methods or ()):
            for key in (None, "rh-wrong-key-00000000000000000000"):
                assert await asyncio.to_thread(status, gateway, method, path, key) == 401, (method, path)
            assert await asyncio.to_thread(status, gateway, method, path, KEYS["t1"]) != 401, (method, path)
    assert node.calls == []
    assert gateway.scheduler.submitted == []


async def test_without_a_key_only_the_public_set_answers(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B05: below 400 without a key are exactly liveness and readiness; no engine call is made by the sweep."""
    answered: set[tuple[str, str]] = set()
    for path in (*PATHS, *SPELLINGS, "/health/live", "/health/ready"):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
            got = await asyncio.to_thread(status, gateway, method, path)
            if got < 400:
                answered.add((path.partition("?")[0], method))
            elif (path.partition("?")[0], method) not in PUBLIC:
                assert got in (400, 401), (method, path, got)
    assert answered == PUBLIC
    assert node.calls == []
    assert gateway.scheduler.submitted == []


@pytest.mark.parametrize("key", ["rh-wrong-key-00000000000000000000", "x" * 5000])
async def test_a_wrong_key_is_as_good_as_none(gateway: RunningGateway, key: str) -> None:
    """The key is not in the answer."""
    async with gateway.client(authorization=f"Bearer {key}") as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert not key or key not in answer.text


@pytest.mark.parametrize("header", ["api-key", "x-api-key"])
async def test_other_headers_carry_a_key_too(gateway: RunningGateway, header: str) -> None:
    """As other clients send it."""
    async with gateway.client(authorization="", **{header: KEYS["t1"]}) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_loading_is_not_for_tenants(gateway: RunningGateway) -> None:
    """Case B05: with a tenant's key load and unload are 403."""
    async with gateway.client() as client:
        for action in ("load", "unload"):
            answer = await client.post(f"/v2/repository/models/m/{action}", json={})
            assert answer.status_code == 403
            assert set(answer.json()) == {"error"}


async def test_every_live_grpc_service_is_guarded_or_public(gateway: RunningGateway) -> None:
    """Case B05: the services that reflection lists are walked; only health and reflection answer without a key."""
    public = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    pool = descriptor_pool.Default()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        [answer] = [message async for message in reflection.ServerReflectionInfo(asked)]
        names = {service.name for service in answer.list_services_response.service}
        assert public < names
        for name in names - public:
            for method in pool.FindServiceByName(name).methods:
                call: Any = (
                    channel.stream_stream(f"/{name}/{method.name}")
                    if method.client_streaming
                    else (channel.unary_stream(f"/{name}/{method.name}"))
                )
                empty = iter([b""]) if method.client_streaming else b""
                for metadata in (None, (("authorization", "Bearer rh-wrong"),)):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await read_all(call(empty, metadata=metadata, timeout=30))
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, (name, method.name)


async def read_all(call: Any) -> None:
    """Read a stream to its end."""
    async for _ in call:
        pass


async def test_every_grpc_method_needs_a_key(gateway: RunningGateway, node: FakeNode) -> None:
    """Case B05: UNAUTHENTICATED without a key; with a tenant's key operators' methods are PERMISSION_DENIED."""
    offered = {
        "ServerLive",
        "ServerReady",
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelStatistics",
        "ModelInfer",
        "ModelStreamInfer",
    }
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.addresses.grpc}") as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        for method in SERVICE.methods:
            assert await grpc_code(stub, method, None) is grpc.StatusCode.UNAUTHENTICATED, method.name
            assert await grpc_code(stub, method, "rh-wrong") is grpc.StatusCode.UNAUTHENTICATED, method.name
            if method.name not in offered:
                assert await grpc_code(stub, method, KEYS["t1"]) is grpc.StatusCode.PERMISSION_DENIED, method.name
        with_key = (("authorization", f"Bearer {KEYS['t1']}"),)
        assert (await stub.ServerLive(kserve.ServerLiveRequest(), metadata=with_key)).live
    assert node.calls == []


async def grpc_code(stub: Any, method: Any, key: str | None) -> grpc.StatusCode | None:
    """The status of one call with an empty request."""
    request = getattr(kserve, method.input_type.name)()
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    try:
        if method.server_streaming:
            async for _ in getattr(stub, method.name)(iter([request]), metadata=metadata, timeout=60):
                pass
        else:
            await getattr(stub, method.name)(request, metadata=metadata, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None
