#!/usr/bin/env bash
# Trains Llama-3.1-8B-Instruct on 50,000 conversations of Tulu 3 with Megatron Core on eight GPUs, packed, for one epoch, as
# run_sft_megatron_tulu3_50k.yaml beside it says. A run that was stopped goes on, also with other sizes:
#
#   examples/run_sft_megatron_tulu3_50k.sh
#   examples/run_sft_megatron_tulu3_50k.sh resume_from=latest megatron_config.tensor_model_parallel_size=4
set -euo pipefail

burnish train "$(dirname "$0")/run_sft_megatron_tulu3_50k.yaml" "$@"
