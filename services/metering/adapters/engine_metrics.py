"""`EngineCounters` from the metrics pages of Triton servers: our reference engine's names, and the vLLM backend's."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final

import httpx
import structlog
from msgspec import Struct

log = structlog.get_logger(__name__)

TIMEOUT_S: Final = 5.0
_INPUT: Final = frozenset({"roundhouse_engine_prompt_tokens_total", "vllm:prompt_tokens_total"})
_OUTPUT: Final = frozenset({"roundhouse_engine_output_tokens_total", "vllm:generation_tokens_total"})
_SAMPLE: Final = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)\{[^}]*?\bmodel="([^"]*)"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)


class Counted(Struct, frozen=True):
    """Tokens that one loaded model has processed since it was loaded."""

    input_tokens: int = 0
    output_tokens: int = 0


def parse_counters(page: str) -> dict[str, Counted]:
    """The counters of a Prometheus page by Triton's name of the model."""
    found: dict[str, list[int]] = {}
    for name, model, value in _SAMPLE.findall(page):
        if name in _INPUT or name in _OUTPUT:
            found.setdefault(model, [0, 0])[name in _OUTPUT] += round(float(value))
    return {model: Counted(*counts) for model, counts in found.items()}


class TritonCounters:
    """See `ports.EngineCounters`. The client is the caller's to close."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        self._client = client
        self._urls = urls

    async def read(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """See `EngineCounters.read`."""
        pages = await asyncio.gather(*(self._page(url) for url in self._urls))
        return {
            (url, model): (one.input_tokens, one.output_tokens)
            for url, page in zip(self._urls, pages, strict=True)
            for model, one in parse_counters(page).items()
        }

    async def _page(self, url: str) -> str:
        try:
            answer = await self._client.get(url, timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            log.info("engine_metrics_missing", url=url, error=type(error).__name__)
            return ""
        return answer.text if answer.is_success else ""
