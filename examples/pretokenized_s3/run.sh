#!/usr/bin/env bash
# Trains on rows that a pipeline tokenized and put into a bucket, as pretokenized_s3.yaml beside it says; first name your bucket:
#
#   export AWS_PROFILE=research                                      # or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role
#   examples/pretokenized_s3/run.sh "pretokenized_dataset_paths=[s3://BUCKET/stores/alpaca]" \
#       "eval_pretokenized_dataset_paths=[s3://BUCKET/stores/alpaca-heldout]"
set -euo pipefail

burnish train "$(dirname "$0")/pretokenized_s3.yaml" "$@"
