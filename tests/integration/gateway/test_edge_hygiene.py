"""What a gateway's ports take from strangers and what every answer carries: limits, time-outs, headers, CORS, TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from tests.builders.checkpoints import random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.openai_calls import CHAT, post
from tests.integration.gateway.running_gateway import KEYS, RunningGateway, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

LONG_S = 30  # for what happens in less than a second on an idle machine


@pytest.fixture
def gateway_with(nats_url: str, redis_url: str, tmp_path: Path):  # type: ignore[no-untyped-def]  # a context manager
    """A gateway with settings."""

    @asynccontextmanager
    async def start(**settings: object) -> AsyncIterator[RunningGateway]:
        model = llm_model(tokenizer_path=str(random_checkpoint(tmp_path / "m")))
        async with running_gateway(nats_url, redis_url, catalogue(model), node=FakeNode(), **settings) as gateway:  # type: ignore[arg-type]
            yield gateway

    return start


async def raw(gateway: RunningGateway, *pieces: bytes) -> bytes:
    """Send bytes and read until the gateway hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http)
    async with asyncio.timeout(LONG_S):
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def test_every_answer_has_the_security_headers(gateway: RunningGateway) -> None:
    """Good and bad ones, with a key and without; no answer names the server; CORS is off."""
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answers = [
            await client.get("/health/live"),
            await client.get("/v1/models", headers={"origin": "https://pages.example"}),
            await client.get("/nothing"),
            await client.options("/v1/models", headers={"origin": "https://pages.example"}),
        ]
    answers.append(await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1}))
    assert [answer.status_code for answer in answers] == [200, 401, 401, 401, 200]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


async def test_only_named_origins_are_answered(gateway_with) -> None:  # type: ignore[no-untyped-def]
    """A preflight needs no key, a page of another origin gets nothing of use, credentials are never allowed."""
    async with gateway_with(cors_origins=("https://pages.example",)) as gateway:
        asks = {"access-control-request-method": "POST"}
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            named = await client.options("/v1/models", headers={"origin": "https://pages.example", **asks})
            other = await client.options("/v1/models", headers={"origin": "https://evil.example", **asks})
        answer = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1}, origin="https://pages.example")
    assert (named.status_code, other.status_code) == (204, 401)
    assert named.headers["access-control-allow-origin"] == "https://pages.example"
    assert "authorization" in named.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in other.headers
    assert answer.headers["access-control-allow-origin"] == "https://pages.example"
    assert "access-control-allow-credentials" not in named.headers


async def test_heads_have_limits(gateway: RunningGateway) -> None:
    """101 headers, 33 kB of headers, and a head that does not end: 431 each; the gateway goes on."""
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        many = await client.get("/v1/models", headers={f"x-{number}": "1" for number in range(101)})
        long = await client.get("/v1/models", headers={"x-long": "a" * 33_000})
    assert (many.status_code, long.status_code) == (431, 431)
    endless = await raw(gateway, b"GET / HTTP/1.1\r\n", *[b"x-pad: " + b"a" * 8_000 + b"\r\n"] * 20)
    assert endless == b"" or endless.startswith(b"HTTP/1.1 431")
    assert (await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1})).status_code == 200


async def test_a_head_or_body_that_does_not_come_is_not_waited_for(gateway_with) -> None:  # type: ignore[no-untyped-def]
    """Slow loris: nothing at all, half a head, half a body, and a second request's half head on a kept connection."""
    async with gateway_with(head_seconds=0.3, body_seconds=0.3) as gateway:
        assert await raw(gateway) == b""
        assert await raw(gateway, b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n") == b""
        key = KEYS["t1"].encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer " + key + b"\r\n"
        late = await raw(gateway, head + b"connection: close\r\ncontent-length: 1000\r\n\r\n{")
        assert late.startswith(b"HTTP/1.1 408")
        again = await raw(gateway, b"GET /health/live HTTP/1.1\r\nhost: g\r\n\r\n", b"GET /health")
        assert again.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"\\udfff","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x","name":"\\ud800"}]}',
        b"[" * 100_000,
    ],
)
async def test_bytes_that_are_no_text_are_the_callers_fault(gateway: RunningGateway, body: bytes) -> None:
    """Broken UTF-8, lone surrogates in values and names, and endless nesting: 4xx, nothing spent."""
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert gateway.scheduler.submitted == []


async def test_request_ids_are_ours(gateway: RunningGateway) -> None:
    """A client's id is no id of ours."""
    answer = await post(gateway, "/v1/chat/completions", {**CHAT, "max_tokens": 1}, **{"x-request-id": "mine"})
    assert answer.headers["x-request-id"] != "mine"
    assert gateway.scheduler.submitted[0].request_id == answer.headers["x-request-id"]


class Certificates:
    """A CA, a server's certificate and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.cert, self.key = folder / "server.pem", folder / "server.key"
        self.client, self.ca_file = folder / "client.pem", folder / "ca.pem"
        server = self.ca.issue_cert("127.0.0.1", "localhost")
        self.cert.write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
        self.key.write_bytes(server.private_key_pem.bytes())
        self.client.write_bytes(self.ca.issue_cert("client@example.org").private_key_and_cert_chain_pem.bytes())
        self.ca_file.write_bytes(self.ca.cert_pem.bytes())

    def context(self, *, with_certificate: bool) -> ssl.SSLContext:
        """What a client trusts, and shows."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if with_certificate:
            context.load_cert_chain(str(self.client))
        return context

    def grpc_credentials(self, *, with_certificate: bool) -> grpc.ChannelCredentials:
        """The same for gRPC."""
        pem = self.client.read_bytes() if with_certificate else None
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), pem, pem)


async def is_live(gateway: RunningGateway, credentials: grpc.ChannelCredentials) -> bool:
    """Ask over gRPC."""
    address = f"localhost:{gateway.addresses.grpc}"
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {KEYS['t1']}"),)
        return bool((await stub.ServerLive(kserve.ServerLiveRequest(), metadata=metadata, timeout=LONG_S)).live)


async def test_tls_on_every_port(gateway_with, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """HTTP/1.1, HTTP/2 and gRPC with a certificate; answers say that plain HTTP is not to be used again."""
    files = Certificates(tmp_path)
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key), "http2_port": 0}
    async with gateway_with(**settings) as gateway:
        context = files.context(with_certificate=False)
        async with httpx.AsyncClient(verify=context, http2=True) as client:
            first = await client.get(f"https://localhost:{gateway.addresses.http}/health/live")
            second = await client.get(f"https://localhost:{gateway.addresses.http2}/health/live")
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://localhost:{gateway.addresses.http}/health/live")
        assert (first.http_version, second.http_version) == ("HTTP/1.1", "HTTP/2")
        assert (first.status_code, second.status_code) == (200, 200)
        assert "strict-transport-security" in first.headers
        assert await is_live(gateway, files.grpc_credentials(with_certificate=False))


async def test_mtls_on_every_port(gateway_with, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Who shows no certificate of the CA is not heard, whatever key he has."""
    files = Certificates(tmp_path)
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_client_ca": str(files.ca_file)}
    async with gateway_with(**settings, http2_port=0) as gateway:
        for port in (gateway.addresses.http, gateway.addresses.http2, gateway.addresses.admin):
            url = f"https://localhost:{port}/health/live"
            async with httpx.AsyncClient(verify=files.context(with_certificate=True), http2=True) as client:
                assert (await client.get(url)).status_code in (200, 404)
            async with httpx.AsyncClient(verify=files.context(with_certificate=False), http2=True) as client:
                with pytest.raises((httpx.HTTPError, ssl.SSLError)):  # httpx lets the alert through if it comes late
                    await client.get(url)
        assert await is_live(gateway, files.grpc_credentials(with_certificate=True))
        with pytest.raises(grpc.aio.AioRpcError):
            await is_live(gateway, files.grpc_credentials(with_certificate=False))
