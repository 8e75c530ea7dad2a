#!/usr/bin/env bash
# Trains Qwen2.5-0.5B-Instruct with Megatron Core on four GPUs: two ranks share each matrix (TP), two stages the layers (PP).
# Words after the script's name override any key:
#
#   examples/run_sft_megatron.sh num_steps=20 batch_size=8
#
# On a machine without a GPU, to see that it works (slow, over gloo), with a model and rows that are there:
#
#   python examples/quickstart/make_model.py && examples/run_sft_megatron.sh megatron_config.cpu=true \
#       model.path=examples/quickstart/model train_datasets=examples/quickstart/data/train.jsonl train_dataset_splits=train
set -euo pipefail

burnish train \
    strategy=megatron \
    placement.num_gpus_per_node=4 \
    megatron_config.tensor_model_parallel_size=2 \
    megatron_config.pipeline_model_parallel_size=2 \
    model.path=Qwen/Qwen2.5-0.5B-Instruct \
    train_datasets="['yahma/alpaca-cleaned']" \
    train_dataset_splits="['train[:100]']" \
    max_length=512 \
    num_steps=10 \
    batch_size=4 \
    "$@"
