"""The keys of the loop: batches, steps, evaluation, checkpoints, and what is logged."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from burnish.config.choices import TrackerName
from burnish.config.section import Section
from burnish.config.values import (
    BlankText,
    Callbacks,
    Flag,
    Number,
    OptionalFree,
    OptionalWhole,
    Text,
    Texts,
    Whole,
    Words,
    several,
    within,
    word_of,
)


class BatchKeys(Section):
    """Batches, steps and loss"""

    batch_size: Annotated[Whole, within(">= 1")] = 4
    """Examples a step, over all ranks."""
    micro_train_batch_size_per_gpu: Annotated[Whole, within(">= 1")] = 2
    """Examples a rank computes at once."""
    remove_microbatch_padding: Flag = True
    """Whether the examples of a micro-batch share one row, without padding."""
    use_sequence_packing: Flag = False
    """Whether the rows of a step are filled up over the whole batch, one row a micro-batch."""
    max_tokens_per_microbatch: Annotated[OptionalWhole, within(">= 1")] = None
    """Capacity of such a row in tokens; none is `max_length`."""
    batch_tokens: Annotated[OptionalWhole, within(">= 1")] = None
    """Tokens a step instead of `batch_size` examples; needs `num_steps`."""
    num_steps: Annotated[OptionalWhole, within(">= 1")] = None
    """Optimizer steps of the run."""
    num_epochs: Annotated[OptionalWhole, within(">= 1")] = None
    """Passes over the data, instead of `num_steps`; with neither it is 1. An epoch is ceil(rows / batch_size) steps."""
    label_smoothing: Annotated[Number, within(">= 0", "< 1")] = 0.0
    """Share of each target that is spread over the vocabulary."""
    z_loss: Annotated[Number, within(">= 0")] = 0.0
    """Weight of the squared log of the softmax denominator."""
    max_bad_steps: Annotated[Whole, within(">= 1")] = 3
    """Steps in a row with a loss or gradient that is not finite before the run stops."""
    dummy_run_full_ctx: Flag = False
    """Whether to train on random rows of full length, the worst case for memory."""
    dummy_run_max_steps: Annotated[Whole, within(">= 1")] = 5
    """Steps of such a run."""


class GenerateConfig(Section):
    """Answers written during an evaluation."""

    prompts: Texts = ()
    """Prompts to answer at each evaluation."""
    every: Annotated[Whole, within(">= 1")] = 1
    """Answer them at every n-th evaluation."""
    max_new_tokens: Annotated[Whole, within(">= 1")] = 64
    """Most tokens of an answer."""


class EvalKeys(Section):
    """Evaluation and callbacks"""

    eval_interval: Annotated[Whole, within(">= 0")] = 0
    """Steps between evaluations; eval sets are always evaluated after the last step too."""
    eval_before_train: Flag = False
    """Whether to evaluate before the first step, logged as step 0."""
    eval_generate: GenerateConfig = GenerateConfig()
    callbacks: Callbacks = ()
    """Callback classes by dotted path, or `{path: kwargs}`."""

    @property
    def callback_specs(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Dotted path and keyword arguments of each of ``callbacks``."""
        entries = ({entry: None} if isinstance(entry, str) else entry for entry in self.callbacks)
        return tuple((path, kwargs or {}) for entry in entries for path, kwargs in entry.items())


class CheckpointKeys(Section):
    """Checkpoints and export"""

    ckpt_path: BlankText = ""
    """Where checkpoints are saved as `global_step_N/`: a local folder, s3:// or gs://; empty saves none."""
    ckpt_interval: Annotated[Whole, within(">= 0")] = 0
    """Steps between checkpoints; 0 saves only at the end."""
    max_ckpts_to_keep: Annotated[Whole, within(">= -1")] = -1
    """How many of the newest checkpoints are kept; -1 keeps all."""
    resume_from: BlankText = ""
    """Empty starts fresh, `latest` goes on from the newest complete checkpoint in `ckpt_path`, else the path of a `global_step_N` folder."""
    resume_allow_changes: Flag = False
    """Whether data, batch size, sampler, weights, seed or optimizer may differ from the checkpoint's."""
    resume_weights_only: Flag = False
    """Whether to take only the weights from the checkpoint and start at step 0."""
    hf_save_interval: Annotated[Whole, within(">= 0")] = 0
    """Steps between Hugging Face exports, also at the end; 0 exports none."""
    export_path: BlankText = ""
    """Where these go as `global_step_N/`; empty is `{ckpt_path}/hf_exports`."""
    shutdown_grace_seconds: Annotated[Whole, within(">= 0")] = 600
    """Seconds our launcher waits for a save after SIGTERM."""


class LogKeys(Section):
    """Logging and profiling"""

    log_dir: Text = "runs"
    """`{log_dir}/{run_name}/` holds metrics.jsonl, the effective config and the report."""
    logger: Annotated[
        tuple[TrackerName, ...],
        BeforeValidator(several(word_of(TrackerName))),
        Words("list of console, tensorboard, wandb, mlflow, trackio"),
    ] = (TrackerName.CONSOLE,)
    """Where metrics are shown; metrics.jsonl is always written."""
    project_name: Text = "burnish"
    """Project the trackers file the run under."""
    run_name: Text = "sft"
    """Name of the run."""
    tags: Texts = ()
    """Tags the trackers put on the run."""
    torch_profiler_config: OptionalFree = None
    """Settings of the torch profiler; none is off."""
    record_memory: Flag = False
    """Whether to record a history of GPU memory."""
