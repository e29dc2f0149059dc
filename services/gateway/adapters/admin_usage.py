"""Metering's query API over HTTP. Which tenant may be asked about is decided before this is called."""

from collections.abc import Mapping

import httpx

from roundhouse.errors import InvalidInput, Unavailable

TIMEOUT_S = 10.0  # a guess: a month of a busy tenant, grouped


class HttpUsageQueries:
    """`UsageQueries` over an HTTP client whose base address is metering's; the client is the caller's to close."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def usage(self, parameters: Mapping[str, str]) -> object:
        """See `UsageQueries.usage`."""
        try:
            answer = await self._client.get("/v1/usage", params=dict(parameters), timeout=TIMEOUT_S)
            body: object = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unavailable("metering does not answer now") from error
        if answer.status_code == httpx.codes.OK:
            return body
        raise _refusal(answer.status_code, body)


def _refusal(status: int, body: object) -> InvalidInput | Unavailable:
    error = body.get("error") if isinstance(body, dict) else None
    if status == httpx.codes.BAD_REQUEST and isinstance(error, dict):
        return InvalidInput(str(error.get("message")), param=error.get("param"))
    return Unavailable("metering does not answer now")
