#!/usr/bin/env bash
# As run_sft_megatron.sh, but the examples of a step are packed into as few rows of 2048 tokens as hold them.
#
#   examples/run_sft_megatron_packed.sh max_tokens_per_microbatch=4096
set -euo pipefail

exec "$(dirname "$0")/run_sft_megatron.sh" \
    use_sequence_packing=true \
    max_length=2048 \
    max_tokens_per_microbatch=2048 \
    batch_size=32 \
    megatron_config.sequence_parallel_size=2 \
    "$@"
