#!/usr/bin/env bash
# Fine-tunes Qwen2.5-VL-3B-Instruct on questions about pictures, as run_sft_fsdp_vlm.yaml beside it says. First the rows:
#
#   python examples/prepare_cauldron_vlm.py vqav2 --rows 2000 --heldout 200 --out data/vqav2
#   examples/run_sft_fsdp_vlm.sh
#   examples/run_sft_fsdp_vlm.sh num_steps=20 batch_size=8 "model.freeze=[]"     # words override any key
set -euo pipefail

burnish train "$(dirname "$0")/run_sft_fsdp_vlm.yaml" "$@"
