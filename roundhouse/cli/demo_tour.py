"""The tour: a script of requests against a fresh mesh, with everything it prints measured on the way.

It asserts nothing; the end-to-end tests do. Prompts and answers are printed because they are the demo's own.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.local.admin_client import AdminClient
from deploy.local.cluster import RunningCluster
from deploy.local.home import ClusterProblem
from roundhouse.cli.demo_loud import Errand, LoudTenant
from roundhouse.cli.demo_requests import Answer, ask, open_client

LOUD, QUIET = "acme", "globex"
LOUD_REQUESTS = 60
QUIET_PERIOD_S = 0.3
QUIET_REQUESTS = 20
TOKENS = 24
LEDGER_WITHIN_S = 15.0
PROMPT = "Tell me about railways and turntables."


class Tour:
    """One tour over one cluster."""

    def __init__(self, cluster: RunningCluster, admin: AdminClient, console: Console) -> None:
        self._admin = admin
        self._console = console
        self._keys = cluster.secrets.tenant_keys
        self._url = cluster.plan.http_url
        self._catalogue: dict[str, Any] = {}

    async def run(self) -> None:
        """All stops. Raises ClusterProblem when a stop fails."""
        self._catalogue = await self._admin.catalogue()
        async with open_client(self._url) as client:
            model, adapter = self._own_model(LOUD), self._own_adapter(LOUD)
            self._title(f"1. A cold model: {model} is on no node yet")
            await self._streamed(client, model)
            self._title("2. The same model, warm")
            await self._streamed(client, model)
            self._title(f"3. An adapter of {LOUD}: {adapter} over {self._catalogue['adapters'][adapter]['base']}")
            await self._streamed(client, adapter)
            self._title("4. A key that is not one")
            refused = await ask(client, "rh-" + "x" * 43, model, PROMPT, max_tokens=4)
            self._say(f"   HTTP {refused.status}, {refused.error}")
            await self._loud_and_quiet(client)
        self._title("6. The bill, from the ledger")
        await self._bill()

    async def _streamed(self, client: httpx.AsyncClient, model: str) -> None:
        self._console.print("   ", end="")
        answer = await ask(client, self._keys[LOUD], model, PROMPT, max_tokens=TOKENS, on_text=self._stream_text)
        self._console.print()
        self._require(answer)
        row = await self._ledger_row(answer.request_id)
        wait = ", ".join(f"{name} {row[f'{name}_ms']} ms" for name in ("queue", "stage", "load"))
        rate = answer.output_tokens / max(answer.total_ms - answer.first_token_ms, 1) * 1000
        self._say(
            f"   first token after {answer.first_token_ms:.0f} ms ({wait}) on {row['node']};"
            f" {answer.output_tokens} tokens at {rate:.0f} a second; {row['amount']} {row['currency']}"
        )

    async def _loud_and_quiet(self, client: httpx.AsyncClient) -> None:
        """The same shared base model for both tenants: they compete for its slots."""
        model = "base-s"
        self._title(
            f"5. {LOUD} sends {LOUD_REQUESTS} requests at once, {QUIET} one each {QUIET_PERIOD_S * 1000:.0f} ms"
        )
        self._require(await ask(client, self._keys[QUIET], model, PROMPT, max_tokens=TOKENS))  # warm
        errand = Errand(self._url, self._keys[LOUD], model, PROMPT, TOKENS, LOUD_REQUESTS)
        table = Table("tenant", "requests", "answered", "p50", "p99", box=None, pad_edge=False)
        async with LoudTenant(errand) as loud:
            alone = await self._quiet(client, model)
            await loud.go()
            beside = await self._quiet(client, model)
            rows = {
                f"{QUIET}, alone": alone,
                f"{QUIET}, beside {LOUD}": beside,
                f"{LOUD}, all at once": await loud.answers(),
            }
        for name, answers in rows.items():
            table.add_row(name, str(len(answers)), *_waits(answers))
        self._say("   time to first token:")
        self._console.print(table)

    async def _quiet(self, client: httpx.AsyncClient, model: str) -> list[Answer]:
        asked = []
        for _ in range(QUIET_REQUESTS):
            asked.append(asyncio.create_task(ask(client, self._keys[QUIET], model, PROMPT, max_tokens=TOKENS)))
            await asyncio.sleep(QUIET_PERIOD_S)
        return list(await asyncio.gather(*asked))

    async def _bill(self) -> None:
        """Groups of the ledger, once every request that was answered has its row."""
        rows = await self._admin.usage(group_by="tenant,model,adapter")
        table = Table(
            "tenant", "model", "adapter", "requests", "input", "cached", "output", "amount", box=None, pad_edge=False
        )
        for row in rows:
            tokens = [str(row[f"{kind}_tokens"]) for kind in ("input", "cached", "output")]
            money = f"{row['amount']} {row['currency']}"
            table.add_row(row["tenant"], row["model"], row["adapter"], str(row["requests"]), *tokens, money)
        self._console.print(table)

    async def _ledger_row(self, request_id: str) -> dict[str, Any]:
        """The ledger's row of a request, which comes a moment after its answer."""
        deadline = time.monotonic() + LEDGER_WITHIN_S
        while time.monotonic() < deadline:
            for row in await self._admin.usage(group_by="request", tenant=LOUD):
                if row["request_id"] == request_id:
                    return row
            await asyncio.sleep(0.05)
        raise ClusterProblem(f"the ledger has no row of {request_id} after {LEDGER_WITHIN_S:.0f} s")

    def _own_model(self, tenant: str) -> str:
        """A fine-tune that only this tenant sees: nobody can have warmed it."""
        return str(next(name for name in sorted(self._catalogue["models"]) if name.startswith(f"{tenant}-")))

    def _own_adapter(self, tenant: str) -> str:
        adapters = self._catalogue["adapters"]
        return str(next(name for name in sorted(adapters) if adapters[name].get("tenant") == tenant))

    def _stream_text(self, text: str) -> None:
        self._console.print(Text(text, "cyan"), end="", soft_wrap=True)

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, "bold"))

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _require(self, answer: Answer) -> None:
        if not answer.good:
            raise ClusterProblem(f"the demo's request failed: HTTP {answer.status}, {answer.error}")


def _waits(answers: Sequence[Answer]) -> tuple[str, str, str]:
    good = sorted(answer.first_token_ms for answer in answers if answer.good)
    if not good:
        return "0", "-", "-"
    return str(len(good)), f"{percentile(good, 50):.0f} ms", f"{percentile(good, 99):.0f} ms"


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank of sorted values: with 20 values the 99th is the largest."""
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]
