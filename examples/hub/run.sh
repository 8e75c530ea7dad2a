#!/usr/bin/env bash
# Trains Qwen2.5-0.5B-Instruct on a hundred Alpaca rows. Words after the script's name override any key:
#
#   examples/hub/run.sh
#   examples/hub/run.sh num_steps=100 optimizer_config.lr=2e-5
#
# The last of two words for one key counts, so whatever stands in "$@" wins.
set -euo pipefail

burnish train \
    strategy=fsdp \
    model.path=Qwen/Qwen2.5-0.5B-Instruct \
    train_datasets="['yahma/alpaca-cleaned']" \
    train_dataset_splits="['train[:100]']" \
    max_length=512 \
    num_steps=10 \
    batch_size=4 \
    "$@"
