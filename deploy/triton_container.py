"""Triton as the one process of a container: assembles its backend folder and becomes the server.

`python -m deploy.triton_container --help`. Readiness is Triton's own /v2/health/ready.
"""

import argparse
import os
from pathlib import Path

from deploy.local.triton import TritonPorts, triton_program
from roundhouse.environment import child_environment


def main() -> None:
    """Replace this process by tritonserver."""
    parser = argparse.ArgumentParser(prog="python -m deploy.triton_container", description=__doc__)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104 - inside a container
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--folder", type=Path, default=Path("triton"), help="gets models/ and backends/")
    parser.add_argument("--shared-memory-prefix", default="triton-", help="one for each server of an IPC namespace")
    given = parser.parse_args()
    program = triton_program(
        "triton",
        TritonPorts(given.grpc_port, given.http_port, given.metrics_port),
        given.folder.absolute(),
        Path(os.devnull),
        shared_memory_prefix=given.shared_memory_prefix,
        host=given.host,
    )
    argv = list(program.command.argv)
    os.execve(argv[0], argv, child_environment(program.command.environment))  # noqa: S606 - an absolute path of ours


if __name__ == "__main__":
    main()
