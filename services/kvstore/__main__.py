"""`python -m services.kvstore`: the kvstore of one node, configured by the environment."""

import argparse

from roundhouse.environment import read_settings
from roundhouse.lifecycle import run
from services.kvstore.app import application
from services.kvstore.settings import KvStoreSettings


def _help() -> str:
    lines = ["environment variables:"]
    for name, field in KvStoreSettings.model_fields.items():
        default = "generated" if field.default_factory else f"default {field.default!r}"
        default = "required" if field.is_required() else default
        lines.append(f"  ROUNDHOUSE_{name.upper():<16} {field.description or ''} ({default})")
    return "\n".join(lines)


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    argparse.ArgumentParser(
        prog="python -m services.kvstore",
        description="KV cache blocks of one node in shared memory, for the engines of that node.",
        epilog=_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    settings = read_settings(KvStoreSettings)
    run("kvstore", settings, application(settings))


if __name__ == "__main__":
    main()
