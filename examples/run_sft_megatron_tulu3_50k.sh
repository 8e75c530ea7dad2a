#!/usr/bin/env bash
# Trains Llama-3.1-8B-Instruct on 50,000 conversations of Tulu 3 with Megatron Core on eight GPUs, packed; one epoch, with checkpoints.
# A run that was stopped goes on from its newest checkpoint, also with other sizes: resume_from=latest.
set -euo pipefail

burnish train \
    strategy=megatron \
    placement.num_gpus_per_node=8 \
    megatron_config.tensor_model_parallel_size=2 \
    megatron_config.sequence_parallel_size=2 \
    megatron_config.pipeline_model_parallel_size=2 \
    model.path=meta-llama/Llama-3.1-8B-Instruct \
    train_datasets="['allenai/tulu-3-sft-mixture']" \
    train_dataset_splits="['train[:50000]']" \
    train_on_what=all_assistant_messages \
    use_sequence_packing=true \
    max_length=4096 \
    max_tokens_per_microbatch=8192 \
    batch_size=128 \
    optimizer_config.lr=5e-6 \
    optimizer_config.scheduler=linear \
    optimizer_config.num_warmup_steps=0.03 \
    run_name=tulu3-50k \
    ckpt_path=runs/tulu3-50k/checkpoints \
    ckpt_interval=100 \
    hf_save_interval=1000 \
    "$@"
