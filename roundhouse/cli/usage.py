"""`roundhouse usage`: what was used and what it costs, from the ledger."""

from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any

import typer

from roundhouse.cli.admin_client import AdminApi, AdminKey, AdminUrl, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table

SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
PAGES_MAX = 1_000  # a stop for a server that never ends its pages


def usage(
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant.")] = "",
    by: Annotated[
        str, typer.Option("--by", help="Group by tenant, model, adapter, class, key, day, hour.")
    ] = "tenant,model",
    since: Annotated[str, typer.Option("--since", help="From this date or time on.")] = "",
    until: Annotated[str, typer.Option("--until", help="Before this date or time.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Show usage by group, with the totals of each currency."""
    with refusals_told():
        groups = [name.strip() for name in by.split(",") if name.strip()]
        wanted = {"tenant": tenant, "from": since, "to": until, "group_by": ",".join(groups)}
        rows = _all_pages(open_api(admin_url, admin_key), {name: text for name, text in wanted.items() if text})
        if output is not Format.TABLE:
            show_data(rows, output)
            return
        _show(groups, rows)


def _all_pages(api: AdminApi, parameters: dict[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _ in range(PAGES_MAX):
        page = api.get("/usage", **parameters)
        rows += page["rows"]
        if page["next_cursor"] is None:
            break
        parameters = {**parameters, "cursor": page["next_cursor"]}
    return rows


def _show(groups: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    columns = [*groups, *SUMS, "amount", "currency"]
    shown: list[list[Any]] = [[row.get(column) for column in columns] for row in rows]
    totals = _totals(rows)
    for currency, sums in totals.items():
        labels = ["total", *[""] * (len(groups) - 1)][: len(groups)]
        shown.append([*labels, *(int(sums[name]) for name in SUMS), format(sums["amount"], "f"), currency])
    show_table(columns, shown, totals=len(totals))


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Decimal]]:
    totals: dict[str, dict[str, Decimal]] = defaultdict(lambda: defaultdict(Decimal))
    for row in rows:
        for name in (*SUMS, "amount"):
            totals[row["currency"]][name] += Decimal(row[name])
    return dict(totals)
