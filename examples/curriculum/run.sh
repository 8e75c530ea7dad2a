#!/usr/bin/env bash
# Short rows first, as curriculum.yaml beside it says; from the repository's root. Words override any key:
#
#   examples/curriculum/run.sh sampler_kwargs.groups=8
#   examples/curriculum/run.sh batch_tokens=null batch_size=16           # a fixed number of rows a step instead
set -euo pipefail

burnish train "$(dirname "$0")/curriculum.yaml" "$@"
