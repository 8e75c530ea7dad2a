"""Rules between the keys of batches, steps, evaluation, checkpoints and the optimizer."""

import re
from collections.abc import Iterator
from pathlib import Path

from burnish.config.choices import Purpose, Schedule
from burnish.config.run import SFTConfig
from burnish.errors import Problem

_CHECKPOINT = re.compile(r"(.*/)?global_step_[0-9]+/*")


def loop_rules(config: SFTConfig, purpose: Purpose) -> Iterator[Problem]:
    """The rules on batches, steps, evaluation, checkpoints and the optimizer that ``config`` breaks."""
    yield from _batches(config)
    yield from _steps(config)
    yield from _packing(config)
    if purpose is Purpose.TRAIN:
        yield from _evaluation(config)
    yield from _checkpoints(config)
    yield from _optimizer(config)


def _batches(config: SFTConfig) -> Iterator[Problem]:
    if config.batch_tokens is None:
        return
    if "batch_size" in config.explicit_keys:
        message = "batch_tokens takes its place"
        yield Problem("batch_size", config.batch_size, message, "leave out batch_size or batch_tokens")
    if config.num_steps is None:
        message = "needs num_steps, as the steps of an epoch are not known"
        yield Problem("batch_tokens", config.batch_tokens, message, "give num_steps")


def _steps(config: SFTConfig) -> Iterator[Problem]:
    if config.num_steps is not None and config.num_epochs is not None:
        message = f"num_epochs={config.num_epochs} is given too"
        yield Problem("num_steps", config.num_steps, message, "leave out num_steps or num_epochs")
    if config.dummy_run_full_ctx and config.max_length is None:
        yield Problem("dummy_run_full_ctx", True, "needs max_length, the length of its rows", "give max_length")


def _packing(config: SFTConfig) -> Iterator[Problem]:
    if config.use_sequence_packing and config.max_length is None:
        yield Problem("use_sequence_packing", True, "needs max_length", "give max_length, in tokens")
    if config.use_sequence_packing and not config.remove_microbatch_padding:
        message = "needs remove_microbatch_padding=true"
        yield Problem("use_sequence_packing", True, message, "leave out remove_microbatch_padding=false")
    capacity, longest = config.max_tokens_per_microbatch, config.max_length
    if capacity is not None and longest is not None and capacity < longest:
        message = f"is less than max_length={longest}, so that the longest row would not fit"
        yield Problem("max_tokens_per_microbatch", capacity, message, f"give {longest} or more")


def _evaluation(config: SFTConfig) -> Iterator[Problem]:
    if config.eval_sources:
        return
    fix = "name data in eval_datasets, or stores in eval_pretokenized_dataset_paths"
    for key, value in (("eval_interval", config.eval_interval), ("eval_before_train", config.eval_before_train)):
        if value:
            yield Problem(key, value, "there is no eval set", fix)


def _checkpoints(config: SFTConfig) -> Iterator[Problem]:
    resume = config.resume_from
    if config.max_ckpts_to_keep == 0:
        yield Problem("max_ckpts_to_keep", 0, "would keep no checkpoint", "give -1 to keep all, or 1 or more")
    if not config.ckpt_path:
        fix = "give ckpt_path"
        if config.ckpt_interval > 0:
            message = "there is no ckpt_path to save checkpoints into"
            yield Problem("ckpt_interval", config.ckpt_interval, message, fix)
        if resume == "latest":
            yield Problem("resume_from", resume, "there is no ckpt_path to look for the latest in", fix)
        if config.hf_save_interval > 0 and not config.export_path:
            message = "there is neither export_path nor ckpt_path to export into"
            yield Problem("hf_save_interval", config.hf_save_interval, message, "give export_path or ckpt_path")
    elif config.hf_save_interval > 0 and config.export_path and Path(config.export_path) == Path(config.ckpt_path):
        message = "is ckpt_path too, and a folder global_step_N cannot be an export and a checkpoint"
        yield Problem("export_path", config.export_path, message, "give another folder, or leave it out")
    if resume not in ("", "latest") and not _CHECKPOINT.fullmatch(resume):
        message = "is neither empty, nor latest, nor the path of a global_step_N folder"
        yield Problem("resume_from", resume, message, "give latest, or the whole path, such as ckpts/global_step_100")


def _optimizer(config: SFTConfig) -> Iterator[Problem]:
    keys = config.optimizer_config
    warmup = keys.num_warmup_steps
    if len(keys.adam_betas) != 2:
        message = f"has {len(keys.adam_betas)} entries, not 2"
        yield Problem("optimizer_config.adam_betas", list(keys.adam_betas), message, "write [0.9, 0.95]")
    if warmup >= 1 and not warmup.is_integer():
        message = "is neither a number of steps nor a share below 1"
        yield Problem("optimizer_config.num_warmup_steps", warmup, message, f"write {round(warmup)}")
    if warmup and keys.scheduler is Schedule.CONSTANT:
        message = "has no effect on scheduler=constant"
        fix = "leave it out, or write optimizer_config.scheduler=constant_with_warmup"
        yield Problem("optimizer_config.num_warmup_steps", warmup, message, fix)
