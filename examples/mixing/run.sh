#!/usr/bin/env bash
# Two datasets in shares of your own, each with an eval set, as mixing.yaml beside it says; from the repository's root.
#
#   examples/mixing/run.sh "train_dataset_weights=[1, 1]"
set -euo pipefail

burnish train "$(dirname "$0")/mixing.yaml" "$@"
