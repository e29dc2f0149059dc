"""The launchers of the real parts: each starts, answers, survives a kill and leaves nothing behind."""

import subprocess
import sys
import time
from pathlib import Path

import nats
import psycopg
import redis
import tritonclient.grpc as triton_grpc

from deploy.local.child import group_members, process_start_ticks
from tests.conftest import TritonFactory
from tests.infra import FaultyServer, TritonServer

ECHO_MODEL = """
import triton_python_backend_utils as pb_utils
import engines, numpy, sys
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]) for values in inputs]
"""
ECHO_CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [-1] }]
"""


def write_echo_model(server: TritonServer) -> None:
    """A Python model that answers its input and needs this project and NumPy to import."""
    version = server.model_repository / "echo" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(ECHO_MODEL)
    (version.parent / "config.pbtxt").write_text(ECHO_CONFIG)


async def test_nats_keeps_streams_over_a_kill(nats_server: FaultyServer) -> None:
    """A message in a file stream is there again after SIGKILL and a restart on the same port."""
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(name="S", subjects=["s.>"])
    await client.jetstream().publish("s.one", b"kept")
    await client.close()
    nats_server.kill()
    nats_server.restart()
    client = await nats.connect(nats_server.url)
    assert (await client.jetstream().get_msg("S", 1)).data == b"kept"
    await client.close()


async def test_each_test_gets_an_empty_nats(nats_url: str) -> None:
    """The session's server has no stream when a test begins; this one leaves one for the next."""
    client = await nats.connect(nats_url)
    assert await client.jetstream().streams_info() == []
    await client.jetstream().add_stream(name="LEFT", subjects=["left.>"])
    await client.close()


async def test_each_test_gets_an_empty_nats_again(nats_url: str) -> None:
    """What the test before left is gone."""
    client = await nats.connect(nats_url)
    assert await client.jetstream().streams_info() == []
    await client.close()


def test_valkey_restarts_on_the_same_port(valkey_server: FaultyServer) -> None:
    """After SIGKILL and a restart the same URL answers."""
    valkey_server.kill()
    valkey_server.restart()
    with redis.Redis.from_url(valkey_server.url) as client:
        assert client.ping()


def test_postgres_answers(postgres_url: str) -> None:
    """The ledger's second dialect accepts a connection."""
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_triton_loads_a_python_model_that_imports_this_project(triton: TritonServer) -> None:
    """The stub of the running Python finds `engines` and NumPy, and the model answers."""
    write_echo_model(triton)
    with triton_grpc.InferenceServerClient(triton.grpc_address) as client:
        client.load_model("echo", client_timeout=20)
        assert client.is_model_ready("echo")
        client.unload_model("echo")


def test_killed_triton_leaves_no_process_and_no_shared_memory(triton_factory: TritonFactory) -> None:
    """SIGKILL of a server with a loaded Python model takes its stub along, and its shared memory is removed."""
    server = triton_factory()
    write_echo_model(server)
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.load_model("echo", client_timeout=20)
    assert server.server.child is not None
    group = server.server.child.pid
    assert len(group_members(group)) >= 2, "the server and its stub"
    assert _shared_memory(server.shared_memory_prefix), "the Python backend uses shared memory"
    server.kill()
    assert group_members(group) == []
    assert _shared_memory(server.shared_memory_prefix) == []


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL of the parent ends the child at once: nothing outlives a killed cluster."""
    script = (
        "import sys, time, pathlib\n"
        "from deploy.local.child import ChildProcess, Command\n"
        "child = ChildProcess.start(Command(['/bin/sleep', '60'], pathlib.Path(sys.argv[1])))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    _wait_for_program(child, "sleep")
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while process_start_ticks(child) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_start_ticks(child) is None


def _wait_for_program(pid: int, name: str) -> None:
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/comm").read_text().strip() != name and time.monotonic() < deadline:
        time.sleep(0.01)


def _shared_memory(prefix: str) -> list[str]:
    return [entry.name for entry in Path("/dev/shm").glob(f"{prefix}*")]  # noqa: S108
