"""KServe's statistics and Triton's asynchronous clients, with nothing but a key in the headers."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from roundhouse.errors import EngineFailed
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway

VALUES = np.array([[1.5, -2.0, 3.25]], dtype=np.float32)


def key_headers(tenant: str = "t1") -> dict[str, str]:
    """A fresh dictionary: Triton's HTTP client writes into the one it is given."""
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def filled(made: Any) -> Any:
    """An input with values."""
    made.set_data_from_numpy(VALUES)
    return made


async def test_the_asynchronous_http_client(gateway: RunningGateway) -> None:
    """Liveness, readiness, metadata, inference and index."""
    async with triton_http_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.http}") as client:
        assert await client.is_server_live(headers=key_headers())
        assert (await client.get_server_metadata(headers=key_headers()))["name"] == "roundhouse"
        inputs = [filled(triton_http.InferInput("x", [1, 3], "FP32"))]
        results = await asyncio.gather(
            *(client.infer("scorer", inputs, headers=key_headers(), request_id=f"{number}") for number in range(4))
        )
        assert all(np.array_equal(result.as_numpy("x"), VALUES) for result in results)
        index = await client.get_model_repository_index(headers=key_headers())
        assert {entry["name"] for entry in index} == {"m", "scorer", "tuned"}
        with pytest.raises(InferenceServerException):
            await client.load_model("scorer", headers=key_headers())


async def test_the_asynchronous_grpc_client_and_its_stream(gateway: RunningGateway, node: FakeNode) -> None:
    """Inference, and `ModelStreamInfer`: three calls on one stream, of which the wrong one is an error of its own."""
    async with triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc}") as client:
        assert await client.is_server_ready(headers=key_headers()) in (True, False)
        one = filled(triton_grpc.InferInput("x", [1, 3], "FP32"))
        result = await client.infer("scorer", [one], headers=key_headers())
        assert np.array_equal(result.as_numpy("x"), VALUES)

        async def calls() -> Any:
            for number, name in enumerate(("scorer", "absent", "scorer")):
                yield {"model_name": name, "inputs": [one], "request_id": str(number)}

        answers = [answer async for answer in client.stream_infer(calls(), headers=key_headers())]
    assert [error is None for _, error in answers] == [True, False, True]
    assert [found.get_response().id for found, error in answers if error is None] == ["0", "2"]


async def test_statistics_count_the_tenants_own_calls(gateway: RunningGateway, node: FakeNode) -> None:
    """Two good calls and one that fails; another tenant sees none of them; models that nobody called say zero."""

    def http() -> Any:
        client = triton_http.InferenceServerClient(f"127.0.0.1:{gateway.addresses.http}")
        try:
            inputs = [filled(triton_http.InferInput("x", [1, 3], "FP32"))]
            client.infer("scorer", inputs, headers=key_headers())
            node.fail_after, node.failure = 0, EngineFailed("The engine failed while it ran the request.")
            with pytest.raises(InferenceServerException):
                client.infer("scorer", inputs, headers=key_headers())
            node.fail_after = None
            return client.get_inference_statistics("scorer", headers=key_headers())
        finally:
            client.close()

    def grpc() -> Any:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc}") as client:
            client.infer("scorer", [filled(triton_grpc.InferInput("x", [1, 3], "FP32"))], headers=key_headers())
            mine = client.get_inference_statistics(headers=key_headers())
            theirs = client.get_inference_statistics("scorer", headers=key_headers("t2"))
            with pytest.raises(InferenceServerException):
                client.get_inference_statistics("absent", headers=key_headers())
            return mine, theirs

    [over_http] = (await asyncio.to_thread(http))["model_stats"]
    assert (over_http["inference_count"], over_http["inference_stats"]["fail"]["count"]) == (1, 1)
    mine, theirs = await asyncio.to_thread(grpc)
    counts = {one.name: (one.inference_count, one.inference_stats.fail.count) for one in mine.model_stats}
    assert counts == {"scorer": (2, 1), "m": (0, 0), "tuned": (0, 0)}
    assert [one.inference_count for one in theirs.model_stats] == [0]
    async with gateway.client() as client:
        assert len((await client.get("/v2/models/stats")).json()["model_stats"]) == 3
        assert (await client.get("/v2/models/absent/stats")).status_code == 404
