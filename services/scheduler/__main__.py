"""`python -m services.scheduler`: one scheduler replica, configured by the environment. `--help` lists the settings."""

from roundhouse.environment import settings_of_process
from roundhouse.lifecycle import run
from services.scheduler.app import application
from services.scheduler.settings import SchedulerSettings

DESCRIPTION = "Fair queues and placement: who runs next, and which model stands where."


def main() -> None:
    """Run until SIGTERM or SIGINT. Exit codes: `lifecycle.run`."""
    settings = settings_of_process(SchedulerSettings, "scheduler", DESCRIPTION)
    run("scheduler", settings, application(settings))


if __name__ == "__main__":
    main()
