"""Runs the gateway: `python -m services.gateway`. Everything is set by environment variables; `--help` lists them."""

import argparse
import sys

from pydantic_core import PydanticUndefined

from roundhouse import lifecycle
from roundhouse.environment import read_settings
from services.gateway.app import application
from services.gateway.settings import GatewaySettings
from services.gateway.workers import run_workers


def _help_text() -> str:
    lines = ["environment variables:"]
    for name, field in GatewaySettings.model_fields.items():
        default = "generated" if field.default is PydanticUndefined else field.default
        lines.append(f"  ROUNDHOUSE_{name.upper()} (default: {default})  {field.description or ''}")
    return "\n".join(lines)


def main() -> None:
    """Parse `--help`, read the settings, run until told to stop."""
    argparse.ArgumentParser(
        prog="python -m services.gateway",
        description="The edge of the mesh: OpenAI and KServe v2 APIs, limits, streams.",
        epilog=_help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    settings = read_settings(GatewaySettings)
    if settings.workers > 1:
        sys.exit(run_workers(settings))
    lifecycle.run("gateway", settings, application(settings))


if __name__ == "__main__":
    main()
