#!/usr/bin/env bash
# Fine-tunes Qwen2.5-VL-3B-Instruct on questions about pictures with Megatron Core on four GPUs, as run_sft_megatron_vlm.yaml
# beside it says. First the rows:
#
#   python examples/prepare_cauldron_vlm.py vqav2 --rows 2000 --heldout 200 --out data/vqav2
#   examples/run_sft_megatron_vlm.sh num_steps=20 batch_size=8
set -euo pipefail

burnish train "$(dirname "$0")/run_sft_megatron_vlm.yaml" "$@"
