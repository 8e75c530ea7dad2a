#!/usr/bin/env bash
# Trains Qwen2.5-0.5B-Instruct with Megatron Core on four GPUs, as run_sft_megatron.yaml beside it says.
# Words after the script's name override any key:
#
#   examples/run_sft_megatron.sh num_steps=20 batch_size=8
#
# On a machine without a GPU, to see that it works (slow, over gloo), with a model and rows that are there:
#
#   python examples/quickstart/make_model.py && examples/run_sft_megatron.sh megatron_config.cpu=true \
#       model.path=examples/quickstart/model train_datasets=examples/quickstart/data/train.jsonl train_dataset_splits=train
set -euo pipefail

burnish train "$(dirname "$0")/run_sft_megatron.yaml" "$@"
