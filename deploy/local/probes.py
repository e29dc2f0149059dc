"""Readiness probes of the real parts: one short question each, None for ready, else the reason."""

import http.client
import json
import socket
from collections.abc import Callable

PROBE_TIMEOUT_S = 1.0


def nats_probe(port: int) -> str | None:
    """Ready when the server greets with JetStream on and answers a PING."""
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
            greeting = connection.makefile("rb").readline()
            if b'"jetstream":true' not in greeting.replace(b" ", b""):
                return "JetStream is off"
            connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            return None if connection.recv(64).startswith(b"PONG") else "no PONG"
    except OSError as error:
        return str(error)


def redis_probe(port: int) -> str | None:
    """Ready when PING is answered with PONG (while it loads its file it answers -LOADING)."""
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(128)
            return None if answer.startswith(b"+PONG") else answer.decode(errors="replace").strip()
    except OSError as error:
        return str(error)


def listening_probe(port: int) -> str | None:
    """Ready when somebody accepts a connection."""
    try:
        socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S).close()
    except OSError as error:
        return f"port {port}: {error}"
    return None


def first_reason(*probes: Callable[[], str | None]) -> str | None:
    """Ready when all are; else the reason of the first that is not."""
    return next((reason for probe in probes if (reason := probe()) is not None), None)


def http_probe(port: int, path: str) -> str | None:
    """Ready when GET `path` answers 200; a service's own reasons are passed on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return None if response.status == 200 else _reasons(response.status, body)


def _reasons(status: int, body: bytes) -> str:
    try:
        conditions: dict[str, str] = json.loads(body)["conditions"]
        return "; ".join(f"{name}: {reason}" for name, reason in conditions.items() if reason != "ok")
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"HTTP {status}"
