"""`roundhouse usage`: what was used and what it costs, from the ledger; as a table, as a plot, as data.

Its subcommands close months, print statements and write exports: `usage_periods`.
"""

from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

import typer

from roundhouse.cli import usage_periods, usage_quarantine, usage_reconcile
from roundhouse.cli.admin_client import AdminApi, AdminKey, AdminUrl, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table
from roundhouse.cli.usage_plot import plot_usage

SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
PAGES_MAX = 1_000  # a stop for a server that never ends its pages


class Plotted(StrEnum):
    """What a plot shows."""

    AMOUNT = "amount"
    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    CACHED_TOKENS = "cached_tokens"
    OUTPUT_TOKENS = "output_tokens"


app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Usage, statements and the end of a month.")
usage_periods.add_to(app)
usage_reconcile.add_to(app)
app.add_typer(usage_quarantine.commands, name="quarantine")


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant.")] = "",
    model: Annotated[str, typer.Option("--model", help="Only this model.")] = "",
    key: Annotated[str, typer.Option("--key", help="Only this key's id.")] = "",
    by: Annotated[
        str, typer.Option("--by", help="Group by tenant, model, adapter, class, key, day, hour.")
    ] = "tenant,model",
    since: Annotated[str, typer.Option("--since", help="From this date or time on.")] = "",
    until: Annotated[str, typer.Option("--until", help="Before this date or time.")] = "",
    plot: Annotated[Plotted | None, typer.Option("--plot", help="Draw this instead of printing a table.")] = None,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Show usage by group, with the totals of each currency; subcommands close months, print statements, export."""
    if context.invoked_subcommand is not None:
        return
    with refusals_told():
        groups = [name.strip() for name in by.split(",") if name.strip()]
        wanted = {
            "tenant": tenant,
            "model": model,
            "key": key,
            "from": since,
            "to": until,
            "group_by": ",".join(groups),
        }
        rows = _all_pages(open_api(admin_url, admin_key), {name: text for name, text in wanted.items() if text})
        if output is not Format.TABLE:
            show_data(rows, output)
        elif plot is not None:
            typer.echo(plot_usage(rows, groups, plot.value))
        else:
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
