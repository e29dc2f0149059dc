"""`roundhouse webhooks`: where billing records are sent, and what was not taken. Receivers: docs/tenants/billing.md."""

from typing import Annotated

import typer

from roundhouse.cli.admin_client import AdminKey, AdminUrl, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_rows, tell

COLUMNS = ("id", "url", "tenant", "state", "sequence", "behind", "attempts", "next", "last_error")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Webhooks of the bill.")


@app.command()
def add(
    url: Annotated[str, typer.Argument(help="https address that takes the records.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant's records; left out, everybody's.")] = "",
    secret: Annotated[str, typer.Option("--secret", help="whsec_…; left out, one is made.")] = "",
    sequence: Annotated[
        int, typer.Option("--from", min=0, help="From this ledger sequence on; 0: what comes from now on.")
    ] = 0,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Send records to an address. Its signing secret is printed once, on stdout alone."""
    with refusals_told():
        body = {"url": url, "tenant": tenant, "secret": secret, "from_sequence": sequence}
        made = open_api(admin_url, admin_key).post("/metering/webhooks", **body)
        if output is not Format.TABLE:
            show_data(made, output)
            return
        typer.echo(made["secret"])
        tell(f"{made['id']} sends to {made['url']}: keep the secret now, it cannot be shown again")


@app.command(name="list")
def list_webhooks(output: Output = Format.TABLE, admin_url: AdminUrl = "", admin_key: AdminKey = "") -> None:
    """Every endpoint, and how far it is."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get("/metering/webhooks")["webhooks"]
        show_rows(found, COLUMNS, output)


@app.command()
def remove(
    webhook: Annotated[str, typer.Argument(help="The endpoint's id.")],
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Send nothing more, and forget what was not taken."""
    with refusals_told():
        open_api(admin_url, admin_key).delete(f"/metering/webhooks/{part(webhook)}")
        tell(f"{webhook} is removed")


@app.command()
def dead(
    webhook: Annotated[str, typer.Argument(help="The endpoint's id.")],
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Records that the endpoint did not take in all their attempts."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get(f"/metering/webhooks/{part(webhook)}/dead")["dead"]
        show_rows(found, ("sequence", "failed", "reason"), output)


@app.command()
def again(
    webhook: Annotated[str, typer.Argument(help="The endpoint's id.")],
    sequence: Annotated[int, typer.Option("--from", min=1, help="First ledger sequence to send again.")],
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Send everything from a sequence on again, also to an endpoint that was switched off."""
    with refusals_told():
        path = f"/metering/webhooks/{part(webhook)}/again"
        open_api(admin_url, admin_key).post(path, from_sequence=sequence)
        tell(f"{webhook} begins again at {sequence}")
