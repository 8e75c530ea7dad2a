#!/usr/bin/env bash
# Fine-tunes Qwen2.5-VL-3B-Instruct on questions about pictures with Megatron Core on four GPUs (TP2 x PP2). First the rows:
#
#   python examples/prepare_cauldron_vlm.py vqav2 --rows 2000 --heldout 200 --out data/vqav2
#   examples/run_sft_megatron_vlm.sh num_steps=20 batch_size=8
#
# The tower stands whole on each rank of the first stage; rows with images, rows of text and packed rows may be mixed.
set -euo pipefail

burnish train \
    strategy=megatron \
    placement.num_gpus_per_node=4 \
    megatron_config.tensor_model_parallel_size=2 \
    megatron_config.pipeline_model_parallel_size=2 \
    model.path=Qwen/Qwen2.5-VL-3B-Instruct \
    train_datasets=data/vqav2/train.parquet \
    train_on_what=all_assistant_messages \
    images=lazy \
    max_length=4096 \
    use_sequence_packing=true \
    max_tokens_per_microbatch=8192 \
    num_steps=50 \
    batch_size=16 \
    "$@"
