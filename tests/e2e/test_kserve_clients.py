"""Triton's own clients against the whole mesh: a classifier behind the same limits, queue and bills."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from tests.e2e.mesh import Mesh

pytestmark = pytest.mark.timeout(120)

Features = NDArray[np.float32]
WIDTH = 16  # of the classifier's features


def key_headers(mesh: Mesh, tenant: str = "acme") -> dict[str, str]:
    """A fresh dictionary: Triton's HTTP client writes into the one it is given."""
    return {"authorization": f"Bearer {mesh.keys[tenant]}"}


@pytest.fixture
def features() -> Features:
    """Three rows for the classifier."""
    return np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)


def over_grpc(mesh: Mesh, features: Features, tenant: str = "acme") -> list[int]:
    """Labels, through Triton's gRPC client."""
    with triton_grpc.InferenceServerClient(mesh.grpc_address) as client:
        tensor = triton_grpc.InferInput("features", list(features.shape), "FP32")
        tensor.set_data_from_numpy(features)
        labels: list[int] = (
            client.infer("classifier", [tensor], headers=key_headers(mesh, tenant)).as_numpy("label").tolist()
        )
        return labels


def over_http(mesh: Mesh, features: Features, *, binary: bool) -> list[int]:
    """Labels, through Triton's HTTP client."""
    client = triton_http.InferenceServerClient(mesh.http_url.removeprefix("http://"))
    try:
        tensor = triton_http.InferInput("features", list(features.shape), "FP32")
        tensor.set_data_from_numpy(features, binary_data=binary)
        outputs = [triton_http.InferRequestedOutput("label", binary_data=binary)]
        answer = client.infer("classifier", [tensor], outputs=outputs, headers=key_headers(mesh))
        labels: list[int] = answer.as_numpy("label").tolist()
        return labels
    finally:
        client.close()


@pytest.fixture
def stub(mesh: Mesh) -> Iterator[Any]:
    """A bare gRPC stub."""
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        yield kserve_grpc.GRPCInferenceServiceStub(channel)


def status_of(mesh: Mesh, stub: Any, request: Any, *, with_key: bool = True) -> grpc.StatusCode:
    """Status of a call that fails."""
    metadata = tuple(key_headers(mesh).items()) if with_key else ()
    with pytest.raises(grpc.RpcError) as raised:
        stub.ModelInfer(request, timeout=20, metadata=metadata)
    code: grpc.StatusCode = raised.value.code()
    return code


def request_of(features: Features, **changes: Any) -> Any:
    """A correct call of the classifier, changed."""
    message = kserve.ModelInferRequest(
        model_name=changes.get("model", "classifier"), model_version=changes.get("version", "")
    )
    message.inputs.add(
        name="features", datatype=changes.get("datatype", "FP32"), shape=changes.get("shape", features.shape)
    )
    message.raw_input_contents.append(changes.get("raw", features.tobytes()))
    return message


def test_both_clients_get_the_same_labels(mesh: Mesh, features: Features) -> None:
    """gRPC, HTTP with JSON and HTTP with binary data agree; afterwards metadata and readiness are known."""
    labels = over_grpc(mesh, features)
    assert len(labels) == 3
    assert over_http(mesh, features, binary=True) == labels
    assert over_http(mesh, features, binary=False) == labels
    with triton_grpc.InferenceServerClient(mesh.grpc_address) as client:
        assert client.is_model_ready("classifier", headers=key_headers(mesh))
        metadata = client.get_model_metadata("classifier", headers=key_headers(mesh))
        assert [one.name for one in metadata.inputs] == ["features"]


def test_statuses_that_clients_can_act_on(mesh: Mesh, stub: Any, features: Features) -> None:
    """Case B04: NOT_FOUND twice, INVALID_ARGUMENT, UNAUTHENTICATED; over REST 404, 404, 400, 401."""
    over_grpc(mesh, features)
    assert status_of(mesh, stub, request_of(features, model="absent")) is grpc.StatusCode.NOT_FOUND
    assert status_of(mesh, stub, request_of(features, version="999")) is grpc.StatusCode.NOT_FOUND
    assert status_of(mesh, stub, request_of(features, datatype="INT32")) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(mesh, stub, request_of(features), with_key=False) is grpc.StatusCode.UNAUTHENTICATED
    body = {"inputs": [{"name": "features", "shape": [1, WIDTH], "datatype": "FP32", "data": [0.0] * WIDTH}]}
    wrong = json.loads(json.dumps(body).replace("FP32", "INT32").replace("0.0", "0"))
    with httpx.Client(base_url=mesh.http_url, headers=key_headers(mesh)) as client:
        assert client.post("/v2/models/absent/infer", json=body).status_code == 404
        assert client.post("/v2/models/classifier/versions/999/infer", json=body).status_code == 404
        assert client.post("/v2/models/classifier/infer", json=wrong).status_code == 400
        assert client.post("/v2/models/classifier/infer", json=body, headers={"authorization": ""}).status_code == 401


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-1, WIDTH]},
        {"shape": [2, WIDTH], "raw": bytes(4 * WIDTH)},
        {"shape": [1_000_000_000, 1_000_000_000]},
        {"shape": [3, 15], "raw": bytes(4 * 45)},
        {"raw": b"short"},
    ],
)
def test_tensors_that_lie_never_reach_triton(
    mesh: Mesh, stub: Any, features: Features, changes: dict[str, Any]
) -> None:
    """Case B43: INVALID_ARGUMENT; Triton keeps its process; the other tenant's labels are right."""
    labels = over_grpc(mesh, features, "globex")
    pids = {part: pid for part, pid in mesh.pids.items() if part.startswith("triton")}
    assert status_of(mesh, stub, request_of(features, **changes)) is grpc.StatusCode.INVALID_ARGUMENT
    assert over_grpc(mesh, features, "globex") == labels
    assert {part: pid for part, pid in mesh.pids.items() if part.startswith("triton")} == pids


def test_text_models_are_called_with_text(mesh: Mesh, stub: Any, features: Features) -> None:
    """A language model under /v2 says where it is called."""
    assert status_of(mesh, stub, request_of(features, model="tiny-1")) is grpc.StatusCode.INVALID_ARGUMENT
