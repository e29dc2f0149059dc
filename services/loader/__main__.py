"""`python -m services.loader`: the loader of one node, configured by the environment."""

import argparse

from roundhouse.environment import read_settings
from roundhouse.lifecycle import run
from services.loader.app import application
from services.loader.settings import LoaderSettings


def _help() -> str:
    lines = ["environment variables:"]
    for name, field in LoaderSettings.model_fields.items():
        default = "generated" if field.default_factory else f"default {field.default!r}"
        default = "required" if field.is_required() else default
        lines.append(f"  ROUNDHOUSE_{name.upper():<20} {field.description or ''} ({default})")
    return "\n".join(lines)


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    argparse.ArgumentParser(
        prog="python -m services.loader",
        description="Weights of one node in every tier, its memory ledger, and Triton's model control.",
        epilog=_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    settings = read_settings(LoaderSettings)
    run("loader", settings, application(settings))


if __name__ == "__main__":
    main()
