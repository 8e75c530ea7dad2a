#!/usr/bin/env bash
# As run_sft_megatron.sh, but the examples of a step are packed into as few rows of 2048 tokens as hold them.
#
#   examples/run_sft_megatron_packed.sh max_tokens_per_microbatch=4096
#
# On a machine without a GPU, to see that it works, with the words that run_sft_megatron.sh names; the model has 512 positions:
#
#   examples/run_sft_megatron_packed.sh megatron_config.cpu=true max_length=512 \
#       model.path=examples/quickstart/model train_datasets=examples/quickstart/data/train.jsonl train_dataset_splits=train
set -euo pipefail

exec "$(dirname "$0")/run_sft_megatron.sh" \
    use_sequence_packing=true \
    max_length=2048 \
    max_tokens_per_microbatch=2048 \
    batch_size=32 \
    megatron_config.sequence_parallel_size=2 \
    "$@"
