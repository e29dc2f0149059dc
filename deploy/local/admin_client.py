"""The few calls that the embedded cluster makes of its own admin API."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx

from deploy.local.home import ClusterProblem

CALL_TIMEOUT_S = 60.0  # applying a catalogue reads the files of all its models


class AdminClient:
    """An operator at the admin API. Every call raises ClusterProblem with what the API said."""

    def __init__(self, admin_url: str, admin_key: str) -> None:
        headers = {"Authorization": f"Bearer {admin_key}"}
        self._http = httpx.AsyncClient(base_url=admin_url, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    async def catalogue(self) -> dict[str, Any]:
        """The catalogue in force: `generation` (0 = none was ever applied), `tenants`, `models`, `adapters` by name."""
        return await self._call("GET", "/admin/v1/catalogue")

    async def apply(self, declaration: Path, *, seen_in: Path | None = None) -> int:
        """Apply a catalogue file; returns the generation in force.

        `seen_in`: the folder of the file as the gateway sees it, if that is another than here."""
        body = {
            "text": await asyncio.to_thread(declaration.read_text),
            "file_name": declaration.name,
            "base_dir": str(seen_in or declaration.parent.absolute()),
        }
        return int((await self._call("POST", "/admin/v1/catalogue", json=body))["generation"])

    async def create_key(self, tenant: str, limits: dict[str, Any] | None = None) -> str:
        """A new key of a tenant, with limits of its own if given; its text is told once."""
        body: dict[str, Any] = {
            "tenant": tenant,
            "scopes": ["inference", "usage:read"],
            "label": "made by roundhouse up",
        }
        if limits is not None:
            body["limits"] = limits
        return str((await self._call("POST", "/admin/v1/keys", json=body))["key"])

    async def usage(self, **parameters: str) -> list[dict[str, Any]]:
        """Rows of the ledger's usage report, first page."""
        return list((await self._call("GET", "/admin/v1/usage", params=parameters))["rows"])

    async def unload(self, model: str) -> None:
        """Take a model off every node."""
        await self._call("POST", f"/admin/v1/models/{model}/unload", json={})

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes with their memory and what they hold."""
        return list((await self._call("GET", "/admin/v1/nodes"))["nodes"])

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ClusterProblem(f"the admin API does not answer: {error or type(error).__name__}") from error
        if response.is_error:
            raise ClusterProblem(f"{method} {path}: {_said(response)}")
        return cast("dict[str, Any]", response.json())


async def visible_models(http_url: str, key: str) -> list[str] | None:
    """What a tenant's key may call, as the gateway lists it; None if the key does not work. Raises ClusterProblem."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=CALL_TIMEOUT_S) as http:
            answer = await http.get(f"{http_url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    except httpx.HTTPError as error:
        raise ClusterProblem(f"the gateway does not answer: {error or type(error).__name__}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return None
    if answer.is_error:
        raise ClusterProblem(f"GET /v1/models: {_said(answer)}")
    return [str(model["id"]) for model in answer.json()["data"]]


def _said(response: httpx.Response) -> str:
    try:
        body = response.json()
        places = [f"\n  {said['file']}:{said['line']}: {said['reason']}" for said in body.get("problems", ())]
        return str(body["error"]["message"]) + "".join(places)
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
