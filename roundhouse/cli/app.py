"""The `roundhouse` command: one embedded cluster, its catalogue, keys, models and usage.

Commands are imported when they are called, so that `roundhouse --help` answers at once.
"""

import logging
from difflib import get_close_matches
from importlib import import_module
from typing import Any, ClassVar

import structlog
import typer
from typer.core import TyperGroup


class LazyCommands(TyperGroup):
    """Commands by name → where they are: a Typer application becomes a group, a function a command."""

    places: ClassVar[dict[str, str]] = {
        "up": "roundhouse.cli.cluster:up",
        "down": "roundhouse.cli.cluster:down",
        "status": "roundhouse.cli.cluster:status",
        "logs": "roundhouse.cli.cluster:logs",
        "demo": "roundhouse.cli.demo:demo",
        "demo-models": "roundhouse.cli.demo:demo_models",
        "bench": "roundhouse.cli.cluster:bench",
        "apply": "roundhouse.cli.catalogue:apply",
        "get": "roundhouse.cli.catalogue:get",
        "keys": "roundhouse.cli.keys:app",
        "models": "roundhouse.cli.models:app",
        "adapters": "roundhouse.cli.adapters:app",
        "files": "roundhouse.cli.files:files",
        "nodes": "roundhouse.cli.nodes:app",
        "tenants": "roundhouse.cli.tenants:app",
        "usage": "roundhouse.cli.usage:app",
        "prices": "roundhouse.cli.prices:app",
        "webhooks": "roundhouse.cli.webhooks:app",
    }

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command, in the order in which a newcomer needs them."""
        return list(self.places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return one command; ends the program if there is no such name."""
        place = self.places.get(cmd_name)
        if place is None:
            similar = "".join(f" Did you mean `{name}`?" for name in get_close_matches(cmd_name, self.places, n=1))
            return ctx.fail(f"No such command `{cmd_name}`.{similar}")
        return _load(cmd_name, place)


def _load(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True} if name == "bench" else None
    single.command(name, context_settings=settings)(found)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Serve hundreds of fine-tuned models to thousands of tenants on few GPUs.",
)


@app.callback()
def _root() -> None:
    """Serve hundreds of fine-tuned models to thousands of tenants on few GPUs."""


def main() -> None:
    """Entry point of the `roundhouse` script."""
    # What the shared rooms log is for services; a person gets the command's own words.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    app()


if __name__ == "__main__":
    main()
