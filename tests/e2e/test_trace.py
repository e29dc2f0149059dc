"""One trace id from the client's header through HTTP, NATS and gRPC into the engine that Triton runs."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.e2e.catalogue import write_catalogue
from tests.e2e.conftest import OPTIONS
from tests.e2e.mesh import Mesh, mesh_running
from tests.infra import wait_until

pytestmark = pytest.mark.timeout(120)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SECRET = "a sentence that must stay between tenant and engine"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver that keeps what it gets in memory."""

    spans: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """trace id → "service: span name"."""
    texts: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        """Keep the spans."""
        with self.lock:
            self.texts.append(str(request))
            for resource in request.resource_spans:
                names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans[span.trace_id.hex()].append(f"{names['service.name']}: {span.name}")
        return trace_service_pb2.ExportTraceServiceResponse()

    def services(self, trace_id: str) -> set[str]:
        """Which services have spans in the trace."""
        with self.lock:
            return {span.split(":")[0] for span in self.spans[trace_id]}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    """The receiver and its endpoint."""
    kept = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: tuple[Collector, str]) -> Iterator[Mesh]:
    """A mesh that exports its spans there, by OpenTelemetry's own variables."""
    root = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector[1])
        environment.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with mesh_running(root / "home", replace(OPTIONS, nodes=1), write_catalogue(root)) as running:
            yield running


def test_one_trace_id_from_http_to_the_engine(traced: Mesh, collector: tuple[Collector, str]) -> None:
    """The client's trace id is on spans of gateway, scheduler, loader and engine; no span holds the prompt or the key
    (invariant 16)."""
    kept, _ = collector
    key = traced.keys["acme"]
    answer = httpx.post(
        f"{traced.http_url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"},
        json={"model": "tiny-1", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    wanted = {f"roundhouse-{name}" for name in ("gateway", "scheduler", "engine")}
    wait_until(
        lambda: None if wanted <= kept.services(TRACE_ID) else f"spans so far: {kept.spans[TRACE_ID]}", within_s=15
    )
    everything = "".join(kept.texts)
    assert SECRET not in everything
    assert key not in everything
