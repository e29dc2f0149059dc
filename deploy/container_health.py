"""A container's health check: `python -m deploy.container_health PORT PATH` exits 0 if it answers 200."""

import sys

from deploy.local.probes import http_probe


def main() -> None:
    """Exit 0 for ready, else 1 with the reason."""
    reason = http_probe(int(sys.argv[1]), sys.argv[2])
    if reason is not None:
        sys.exit(reason)


if __name__ == "__main__":
    main()
