#!/usr/bin/env bash
# Teaches SmolLM2-135M a voice with adapters, as lora.yaml beside it says; from the repository's root. Words override any key:
#
#   examples/lora/run.sh model.lora.rank=32 "model.lora.target_modules=[q_proj, v_proj]"
set -euo pipefail

burnish train "$(dirname "$0")/lora.yaml" "$@"
