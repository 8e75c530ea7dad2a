#!/usr/bin/env bash
# A run that keeps its best checkpoints and stops by itself, as callbacks.yaml beside it says; from the repository's root.
#
#   examples/callbacks/run.sh eval_interval=10
set -euo pipefail

burnish train "$(dirname "$0")/callbacks.yaml" "$@"
