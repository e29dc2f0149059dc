#!/usr/bin/env bash
# Build roundhouse:local. pip inside the build reaches packages as this machine does: its PIP_* settings are passed as
# build arguments, and the build uses the host's network, so that a mirror on this machine can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
arguments=()
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_DEFAULT_TIMEOUT; do
  [ -n "${!name:-}" ] && arguments+=(--build-arg "$name=${!name}")
done
echo "building the image roundhouse:local"
exec docker build --quiet --network host "${arguments[@]}" -f deploy/Dockerfile -t roundhouse:local .
