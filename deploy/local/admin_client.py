"""The few calls that the embedded cluster makes of its own admin API."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx

from deploy.local.home import ClusterProblem

CALL_TIMEOUT_S = 30.0  # applying a catalogue hashes the files of its models


class AdminClient:
    """An operator at the admin API. Every call raises ClusterProblem with what the API said."""

    def __init__(self, admin_url: str, admin_key: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=admin_url,
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=CALL_TIMEOUT_S,
            trust_env=False,
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    async def generation(self) -> int:
        """The catalogue's generation; 0 = none was ever applied."""
        return int((await self._call("GET", "/admin/v1/catalogue"))["generation"])

    async def tenants(self) -> list[str]:
        """Names of the catalogue's tenants."""
        return [str(tenant["name"]) for tenant in (await self._call("GET", "/admin/v1/catalogue"))["tenants"]]

    async def models(self) -> list[dict[str, Any]]:
        """The catalogue's models."""
        return list((await self._call("GET", "/admin/v1/catalogue"))["models"])

    async def apply(self, declaration: Path) -> int:
        """Apply a catalogue file; returns the new generation."""
        headers = {"Content-Type": "application/yaml"}
        params = {"base": str(declaration.parent)}
        content = await asyncio.to_thread(declaration.read_bytes)
        answer = await self._call("PUT", "/admin/v1/catalogue", content=content, headers=headers, params=params)
        return int(answer["generation"])

    async def create_key(self, tenant: str) -> str:
        """A new key of a tenant; its text is told once."""
        body = {"tenant": tenant, "scopes": ["inference", "usage:read"]}
        return str((await self._call("POST", "/admin/v1/keys", json=body))["key"])

    async def usage(self, **parameters: str) -> list[dict[str, Any]]:
        """Rows of the ledger's usage report."""
        return list((await self._call("GET", "/admin/v1/usage", params=parameters))["rows"])

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ClusterProblem(f"the admin API does not answer: {error or type(error).__name__}") from error
        if response.is_error:
            raise ClusterProblem(f"{method} {path}: {_said(response)}")
        return cast("dict[str, Any]", response.json())


def _said(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
