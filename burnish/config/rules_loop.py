"""Rules between the keys of batches, steps, evaluation, checkpoints and the optimizer."""

import re
from collections.abc import Iterator
from pathlib import Path

from burnish.config.choices import Purpose, Schedule
from burnish.config.run import Broken, SFTConfig

_CHECKPOINT = re.compile(r"(.*/)?global_step_[0-9]+/*")


def loop_rules(config: SFTConfig, purpose: Purpose) -> Iterator[Broken]:
    """The rules on batches, steps, evaluation, checkpoints and the optimizer that ``config`` breaks."""
    yield from _steps(config)
    yield from _packing(config)
    if purpose is Purpose.TRAIN and not (config.eval_sources or config.eval_generate.prompts):
        fix = "name data in eval_datasets, stores in eval_pretokenized_dataset_paths, or eval_generate.prompts"
        if config.eval_interval:
            yield "eval_interval", "there is no eval set", fix
        if config.eval_before_train:
            yield "eval_before_train", "there is no eval set", fix
    yield from _checkpoints(config)
    yield from _optimizer(config)
    yield from _profiler(config)


def _steps(config: SFTConfig) -> Iterator[Broken]:
    if config.batch_tokens is not None and "batch_size" in config.explicit_keys:
        yield "batch_size", "batch_tokens takes its place", "leave out batch_size or batch_tokens"
    if config.batch_tokens is not None and config.num_steps is None:
        yield "batch_tokens", "needs num_steps, as the steps of an epoch are not known", "give num_steps"
    if config.num_steps is not None and config.num_epochs is not None:
        yield "num_steps", f"num_epochs={config.num_epochs} is given too", "leave out num_steps or num_epochs"
    if config.dummy_run_full_ctx and config.max_length is None:
        yield "dummy_run_full_ctx", "needs max_length, the length of its rows", "give max_length"


def _packing(config: SFTConfig) -> Iterator[Broken]:
    capacity, longest = config.max_tokens_per_microbatch, config.max_length
    if config.use_sequence_packing and longest is None:
        yield "use_sequence_packing", "needs max_length", "give max_length, in tokens"
    if config.use_sequence_packing and not config.remove_microbatch_padding:
        fix = "leave out remove_microbatch_padding=false"
        yield "use_sequence_packing", "needs remove_microbatch_padding=true", fix
    if capacity is not None and longest is not None and capacity < longest:
        message = f"is less than max_length={longest}, so that the longest row would not fit"
        yield "max_tokens_per_microbatch", message, f"give {longest} or more"


def _checkpoints(config: SFTConfig) -> Iterator[Broken]:
    resume, target, export = config.resume_from, config.ckpt_path, config.export_path
    if config.max_ckpts_to_keep == 0:
        yield "max_ckpts_to_keep", "would keep no checkpoint", "give -1 to keep all, or 1 or more"
    if config.ckpt_interval > 0 and not target:
        yield "ckpt_interval", "there is no ckpt_path to save checkpoints into", "give ckpt_path"
    if resume == "latest" and not target:
        yield "resume_from", "there is no ckpt_path to look for the latest in", "give ckpt_path"
    if config.hf_save_interval > 0 and not (export or target):
        fix = "give export_path or ckpt_path"
        yield "hf_save_interval", "there is neither export_path nor ckpt_path to export into", fix
    if config.hf_save_interval > 0 and export and target and _same_place(export, target):
        message = "is ckpt_path too, and a folder global_step_N cannot be an export and a checkpoint"
        yield "export_path", message, "give another folder, or leave it out"
    if resume not in ("", "latest") and not _CHECKPOINT.fullmatch(resume):
        fix = "give latest, or the whole path, such as ckpts/global_step_100"
        yield "resume_from", "is neither empty, nor latest, nor the path of a global_step_N folder", fix
    if "://" in config.log_dir:
        yield "log_dir", "is no local path", "give a local folder"


def _same_place(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        first, second = (re.sub("^gcs://", "gs://", place).rstrip("/") for place in (one, other))
        return first == second
    return Path(one) == Path(other)


def _profiler(config: SFTConfig) -> Iterator[Broken]:
    keys = config.torch_profiler_config
    given = sorted(key for key in config.explicit_keys if key.startswith("torch_profiler_config."))
    if given and "torch_profiler_config.enable" not in given:
        yield given[0], "has no effect without torch_profiler_config.enable", "write torch_profiler_config.enable=true"
    if "://" in keys.save_path:
        yield "torch_profiler_config.save_path", "is no local path", "give a local folder"
    if keys.export_type == "stacks" and not keys.with_stack:
        yield "torch_profiler_config.export_type", "needs with_stack", "write torch_profiler_config.with_stack=true"
    if keys.enable and not (keys.ranks and keys.activities):
        key = "activities" if keys.ranks else "ranks"
        yield f"torch_profiler_config.{key}", "is empty, so that nothing would be recorded", "leave it out"


def _optimizer(config: SFTConfig) -> Iterator[Broken]:
    betas, warmup = config.optimizer_config.adam_betas, config.optimizer_config.num_warmup_steps
    if len(betas) != 2:
        yield "optimizer_config.adam_betas", f"has {len(betas)} entries, not 2", "write [0.9, 0.95]"
    if warmup >= 1 and not warmup.is_integer():
        message = "is neither a number of steps nor a share below 1"
        yield "optimizer_config.num_warmup_steps", message, f"write {round(warmup)}"
    if warmup and config.optimizer_config.scheduler is Schedule.CONSTANT:
        fix = "leave it out, or write optimizer_config.scheduler=constant_with_warmup"
        yield "optimizer_config.num_warmup_steps", "has no effect on scheduler=constant", fix
