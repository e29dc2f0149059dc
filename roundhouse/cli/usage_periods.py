"""`roundhouse usage close|verify|statement|export|…`: what is done at the end of a month, and with what is recorded."""

import base64
import binascii
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from roundhouse.cli.admin_client import EXIT_REFUSED, AdminKey, AdminUrl, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table, tell

Month = Annotated[str, typer.Argument(help="A month such as 2026-11.")]
TOTALS = ("requests", "attempts", "input_tokens", "cached_tokens", "output_tokens", "amount", "currency")


def add_to(app: typer.Typer) -> None:
    """Make these subcommands of `roundhouse usage`."""
    for command in (close, periods, verify, statement, export, costs, erase, republish):
        app.command(name=command.__name__)(command)


def close(month: Month, output: Output = Format.TABLE, admin_url: AdminUrl = "", admin_key: AdminKey = "") -> None:
    """Close a month: sign its totals; what comes later is billed in the next one. Closing it again changes nothing."""
    with refusals_told():
        closed = open_api(admin_url, admin_key).post(f"/metering/periods/{part(month)}/close")
        if output is not Format.TABLE:
            show_data(closed, output)
            return
        show_table(TOTALS, [[total[column] for column in TOTALS] for total in closed["totals"]])
        tell(f"{closed['period']} is closed since {closed['closed']}, up to row {closed['sequence']}")


def periods(output: Output = Format.TABLE, admin_url: AdminUrl = "", admin_key: AdminKey = "") -> None:
    """Closed months with their totals."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get("/metering/periods")["periods"]
        if output is not Format.TABLE:
            show_data(found, output)
            return
        columns = ("period", "closed", "sequence")
        rows = [
            [*(item[name] for name in columns), *(total[name] for name in TOTALS)]
            for item in found
            for total in item["totals"] or [dict.fromkeys(TOTALS, "-")]  # a month without usage has no currency
        ]
        show_table((*columns, *TOTALS), rows)


def verify(
    month: Month,
    public_key: Annotated[
        str, typer.Option("--public-key", help="The key you trust, base64; without it the one beside the signature.")
    ] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Check a closed month: its signature, here, and that the ledger still says what was signed. Exit code 1 if not."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get(f"/metering/periods/{part(month)}/verify")
    signed = _holds(found["document"], found["signature"], public_key or found["public_key"])
    if output is not Format.TABLE:
        show_data({**found, "signature_checked_here": signed}, output)
    else:
        typer.echo(f"signature: {'good' if signed else 'BAD'} (key {found['public_key']})")
        typer.echo(f"ledger: {'as signed' if found['ledger_agrees'] else 'DIFFERS'}")
        for difference in found["differences"]:
            typer.echo(f"  {difference}")
    if not signed or not found["ledger_agrees"]:
        raise typer.Exit(EXIT_REFUSED)


def statement(
    month: Month,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose; left out, everybody's.")] = "",
    as_: Annotated[str, typer.Option("--as", help="text, json or csv.")] = "text",
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Write a file a tenant here instead of printing.")
    ] = None,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """What is booked for a tenant, or for every tenant, in a month."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        tenants = [tenant] if tenant else api.get(f"/metering/periods/{part(month)}/tenants")["tenants"]
        for name in tenants:
            text = api.text(f"/metering/statements/{part(month)}", tenant=name, format=as_)
            if directory is None:
                typer.echo(text)
                continue
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{month}-{part(name)}.{'txt' if as_ == 'text' else as_}").write_text(text)
        tell(f"statements of {month}: {len(tenants)}")


def export(
    month: Month,
    to: Annotated[Path, typer.Option("--to", help="File to write: .csv, .parquet, or .jsonl (CloudEvents).")],
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant.")] = "",
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Every entry of a month, one row each; corrections twice: what is taken back, and what replaces it."""
    kind = to.suffix.removeprefix(".")
    if kind not in ("csv", "jsonl", "parquet"):
        raise typer.BadParameter("must end in .csv, .jsonl or .parquet", param_hint="--to")
    with refusals_told():
        wanted = {"format": kind} | ({"tenant": tenant} if tenant else {})
        size = open_api(admin_url, admin_key).download(f"/metering/export/{part(month)}", to, **wanted)
        tell(f"{to}: {size} bytes")


def costs(
    since: Annotated[str, typer.Option("--since", help="From this date or time on.")] = "",
    until: Annotated[str, typer.Option("--until", help="Before this date or time.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """What nodes cost, shared out by tokens. An allocation, not a measurement; measured seconds stand beside it."""
    with refusals_told():
        wanted = {name: text for name, text in (("from", since), ("to", until)) if text}
        found = open_api(admin_url, admin_key).get("/metering/costs", **wanted)
        if output is not Format.TABLE:
            show_data(found, output)
            return
        columns = ("pool", "share_of", "model", "tokens", "run_seconds", "allocated", "currency")
        show_table(columns, [[row[column] for column in columns] for row in found["shares"]])
        pools = ("pool", "node_seconds", "device_seconds", "per_node_hour", "cost", "currency")
        show_table(pools, [[row[column] for column in pools] for row in found["pools"]])
        tell(found["note"])


def erase(
    tenant: Annotated[str, typer.Argument(help="Whose usage is made anonymous, for ever.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Replace a tenant by a pseudonym in the ledger, and remove its records from the streams. Sums stay."""
    if not yes:
        typer.confirm(f"Make all usage of {tenant} anonymous? This cannot be undone", abort=True)
    with refusals_told():
        done = open_api(admin_url, admin_key).post(f"/metering/tenants/{part(tenant)}/erase")
        _tell_or_show(done, output, f"{done['rows']} rows of {tenant} now belong to {done['pseudonym']}")


def republish(
    sequence: Annotated[int, typer.Option("--from", help="First ledger sequence to publish again.")],
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Publish the billing stream again from a sequence on, from the ledger. Consumers drop what they have."""
    with refusals_told():
        done = open_api(admin_url, admin_key).post("/metering/billing/republish", from_sequence=sequence)
        _tell_or_show(done, output, f"{done['rows']} rows are published again from {done['from_sequence']} on")


def _tell_or_show(done: dict[str, Any], output: Format, text: str) -> None:
    if output is Format.TABLE:
        tell(text)
    else:
        show_data(done, output)


def _holds(document: str, signature: str, public_key: str) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        key.verify(base64.b64decode(signature, validate=True), document.encode())
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    return True
