"""Operators' commands and the admin API: where it is, which key to use, and what its refusals mean for exit codes.

Address and key come from options, else from `ROUNDHOUSE_ADMIN_URL` and `ROUNDHOUSE_ADMIN_KEY`, else from the folder of
the embedded cluster that runs here. Exit codes: 0 done, 1 refused or nothing to ask, 2 wrong usage.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import quote

import httpx
import typer

from deploy.local.home import ClusterProblem, Home
from roundhouse.environment import admin_access, roundhouse_home

EXIT_REFUSED = 1
TIMEOUT_S = 300.0  # applying reads the weights of every new version, loading moves them

AdminUrl = Annotated[str, typer.Option("--admin-url", metavar="URL", help="Admin API (ROUNDHOUSE_ADMIN_URL).")]
AdminKey = Annotated[str, typer.Option("--admin-key", metavar="KEY", help="Admin key (ROUNDHOUSE_ADMIN_KEY).")]


class Refused(Exception):
    """The admin API said no, or does not answer. `body` is what it said, if that was JSON."""

    def __init__(self, message: str, body: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.body: Mapping[str, Any] = body or {}


@dataclass(frozen=True, slots=True)
class Access:
    """Where the admin API is and the key to use."""

    url: str
    key: str


def find_access(url: str, key: str) -> Access:
    """Complete what options left out. Raises Refused if nothing says where the admin API is."""
    environment_url, environment_key = admin_access()
    url, key = url or environment_url or "", key or environment_key or ""
    if url and key:
        return Access(url, key)
    local = _embedded_cluster()
    if local is None and not url:
        raise Refused(
            f"no cluster runs in {roundhouse_home()}: start one with `roundhouse up`,"
            f" or name one with --admin-url and --admin-key"
        )
    # The key of the cluster here is not sent to an address that someone else named.
    if not key and (local is None or (url and url.rstrip("/") != local.url)):
        raise Refused(f"there is no key for {url}: give --admin-key or set ROUNDHOUSE_ADMIN_KEY")
    assert local is not None
    return Access(url or local.url, key or local.key)


def _embedded_cluster() -> Access | None:
    home = Home(roundhouse_home())
    state = home.read_state()
    if state is None or not home.is_locked():
        return None
    try:
        secrets = home.read_secrets()
    except ClusterProblem as problem:
        raise Refused(str(problem)) from problem
    return None if secrets is None else Access(f"http://127.0.0.1:{state.admin_port}", secrets.admin_key)


class AdminApi:
    """The admin API, one call at a time. Every call raises Refused."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Read something."""
        return self._call("GET", path, params=parameters)

    def post(self, path: str, **body: object) -> dict[str, Any]:
        """Do something."""
        return self._call("POST", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        """End something."""
        return self._call("DELETE", path)

    def text(self, path: str, **parameters: str) -> str:
        """Read something that is not JSON."""
        with self._stream(path, parameters) as answer:
            answer.read()
            return answer.text

    def download(self, path: str, target: Path, **parameters: str) -> int:
        """Read something of any size into a file, which has its name only once it is whole; how many bytes."""
        draft = target.with_name(f"{target.name}.part")
        try:
            with self._stream(path, parameters) as answer, draft.open("wb") as out:
                for chunk in answer.iter_bytes():
                    out.write(chunk)
            draft.replace(target)
        except OSError as error:
            raise Refused(f"{target} cannot be written: {error.strerror}") from error
        finally:
            draft.unlink(missing_ok=True)
        return target.stat().st_size

    @contextmanager
    def _stream(self, path: str, parameters: Mapping[str, str]) -> Iterator[httpx.Response]:
        headers = {"authorization": f"Bearer {self._access.key}"}
        address = f"{self._access.url.rstrip('/')}/admin/v1{path}"
        try:
            with (
                httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as client,
                client.stream("GET", address, params=parameters) as answer,
            ):
                if answer.is_error:
                    answer.read()
                    raise Refused(_said(answer.status_code, _json_or_none(answer)))
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            raise Refused(f"the admin API at {self._access.url} does not answer: {reason}") from error

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._access.key}"}
        address = f"{self._access.url.rstrip('/')}/admin/v1{path}"
        try:
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as client:
                answer = client.request(method, address, **options)
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            raise Refused(f"the admin API at {self._access.url} does not answer: {reason}") from error
        except ValueError as error:
            raise Refused(f"what answers at {self._access.url} is no admin API (HTTP {answer.status_code})") from error
        if answer.is_error or not isinstance(body, dict):
            raise Refused(_said(answer.status_code, body), body if isinstance(body, dict) else None)
        return cast("dict[str, Any]", body)


def open_api(url: str, key: str) -> AdminApi:
    """The admin API for a command's options. Raises Refused."""
    return AdminApi(find_access(url, key))


def part(name: str) -> str:
    """A name as one part of a path, whatever it holds."""
    return quote(name, safe="")


def _json_or_none(answer: httpx.Response) -> object:
    try:
        return answer.json()
    except ValueError:
        return None


def _said(status: int, body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return f"the admin API answered HTTP {status}"
    param, message = error.get("param"), str(error.get("message"))
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{message}: give an admin key with --admin-key or ROUNDHOUSE_ADMIN_KEY"
    return message if not param or param in message else f"{param}: {message}"
