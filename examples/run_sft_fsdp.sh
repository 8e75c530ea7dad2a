#!/usr/bin/env bash
# Trains Qwen2.5-0.5B-Instruct on a hundred Alpaca rows with FSDP2 on one GPU, as run_sft_fsdp.yaml beside it says.
# Words after the script's name override any key; the last of two words for one key counts.
#
#   examples/run_sft_fsdp.sh
#   examples/run_sft_fsdp.sh num_steps=100 "train_dataset_splits=['train[:2000]']" optimizer_config.lr=2e-5
set -euo pipefail

burnish train "$(dirname "$0")/run_sft_fsdp.yaml" "$@"
