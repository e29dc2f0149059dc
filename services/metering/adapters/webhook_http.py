"""Posts to addresses that others chose, carefully.

1. https only, and only to public addresses, unless private ones are allowed by a setting: else whoever may name an
   endpoint could reach our own network through us.
2. The name is resolved once, every address is checked, and the connection goes to a checked one. TLS still checks the
   name. So a name that answers differently the next time (DNS rebinding) gains nothing.
3. Redirects are not followed, answers are not read beyond their headers, and an attempt ends after its time.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from typing import Final

import httpx

from services.metering.domain.webhooks import Answer

ATTEMPT_S: Final = 15.0  # as the Standard Webhooks specification suggests, at the short end
CONNECT_S: Final = 5.0


class HttpPoster:
    """`ports.WebhookPoster` over httpx. Close it with `close`."""

    def __init__(self, *, allow_private: bool, attempt_s: float = ATTEMPT_S) -> None:
        self._allow_private = allow_private
        self._attempt_s = attempt_s
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=16)
        timeout = httpx.Timeout(attempt_s, connect=CONNECT_S)
        self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, limits=limits, timeout=timeout)

    async def close(self) -> None:
        """Close connections. Idempotent."""
        await self._client.aclose()

    def fault_of(self, url: str) -> str | None:
        """Why an address can never be posted to; None if it may."""
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            return "it is not a URL"
        if parsed.scheme not in ("https", "http") or not parsed.host:
            return "it must be an https URL"
        if parsed.userinfo:
            return "it must hold no user or password"
        if parsed.scheme == "http" and not self._allow_private:
            return "it must be https"
        return None

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """One attempt; never raises but when cancelled. Texts name no secret."""
        fault = self.fault_of(url)
        if fault is not None:
            return Answer(0, fault)
        try:
            async with asyncio.timeout(self._attempt_s):
                return await self._post(httpx.URL(url), headers, body)
        except TimeoutError:
            return Answer(0, f"no answer within {self._attempt_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return Answer(0, f"{type(error).__name__}: {error}"[:200])

    async def _post(self, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> Answer:
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self._checked_address(url.host, port)
        if address is None:
            return Answer(0, "the address is not a public one")
        request = self._client.build_request(
            "POST",
            url.copy_with(host=address),
            content=body,
            headers={**headers, "host": url.netloc.decode()},
            extensions={"sni_hostname": url.host},
        )
        answer = await self._client.send(request, stream=True)
        await answer.aclose()
        return Answer(answer.status_code, retry_after_s=_seconds(answer.headers.get("retry-after", "")))

    async def _checked_address(self, host: str, port: int) -> str | None:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses:
            return None
        if not self._allow_private and not all(_is_public(address) for address in addresses):
            return None
        return addresses[0]


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        address = mapped
    return address.is_global and not address.is_multicast


def _seconds(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
