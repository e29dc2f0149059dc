"""`python -m services.gateway`: one gateway, configured by the environment. `--help` lists the settings."""

import sys

from roundhouse.environment import settings_of_process
from roundhouse.lifecycle import run
from services.gateway.app import application
from services.gateway.settings import GatewaySettings
from services.gateway.workers import run_workers

DESCRIPTION = "The edge of the mesh: OpenAI and KServe v2 APIs, limits, streams."


def main() -> None:
    """Run until SIGTERM or SIGINT, in this process or in several. Exit codes: `lifecycle.run`."""
    settings = settings_of_process(GatewaySettings, "gateway", DESCRIPTION)
    if settings.workers > 1:
        sys.exit(run_workers(settings))
    run("gateway", settings, application(settings))


if __name__ == "__main__":
    main()
