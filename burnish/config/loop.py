"""The keys of the loop: batches, steps, evaluation, checkpoints, and what is logged."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from burnish.config.choices import TrackerName
from burnish.config.section import Section


class BatchKeys(Section):
    """Batches, steps and loss"""

    batch_size: int = Field(default=4, ge=1)
    """Examples a step, over all ranks."""
    micro_train_batch_size_per_gpu: int = Field(default=2, ge=1)
    """Examples a rank computes at once."""
    remove_microbatch_padding: bool = True
    """Whether the examples of a micro-batch share one row, without padding."""
    use_sequence_packing: bool = False
    """Whether the rows of a step are filled up over the whole batch, one row a micro-batch."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Capacity of such a row in tokens; none is `max_length`."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens a step at most, instead of `batch_size` examples; needs `num_steps`."""
    num_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the data, instead of `num_steps`; with neither it is 1. An epoch is ceil(rows / batch_size) steps."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target that is spread over the vocabulary."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log of the softmax denominator."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Steps in a row with a loss or gradient that is not finite before the run stops."""
    dummy_run_full_ctx: bool = False
    """Whether to train on random rows of full length, the worst case for memory."""
    dummy_run_max_steps: int = Field(default=5, ge=1)
    """Steps of such a run."""


class GenerateConfig(Section):
    """Answers written during an evaluation."""

    prompts: tuple[str, ...] = ()
    """Prompts to answer in evaluations, each as a user's turn; with prompts, `eval_interval` needs no eval set."""
    every: int = Field(default=1, ge=1)
    """Answer them at every n-th evaluation, before the first step, and at the last."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Most tokens of an answer."""


class EvalKeys(Section):
    """Evaluation and callbacks"""

    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations; eval sets are always evaluated after the last step too."""
    eval_before_train: bool = False
    """Whether to evaluate before the first step, logged as step 0."""
    eval_generate: GenerateConfig = GenerateConfig()
    callbacks: tuple[str | Mapping[str, Mapping[str, Any]], ...] = ()
    """Callback classes by dotted path, or `{path: kwargs}`."""

    @property
    def callback_specs(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Dotted path and keyword arguments of each of ``callbacks``."""
        entries = ({entry: {}} if isinstance(entry, str) else entry for entry in self.callbacks)
        return tuple(spec for entry in entries for spec in entry.items())


class CheckpointKeys(Section):
    """Checkpoints and export"""

    ckpt_path: str = ""
    """Where checkpoints are saved as `global_step_N/`: a local folder, s3:// or gs://; empty saves none."""
    ckpt_interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    max_ckpts_to_keep: int = Field(default=-1, ge=-1)
    """How many of the newest checkpoints are kept; -1 keeps all."""
    resume_from: str = ""
    """Empty starts fresh, `latest` goes on from the newest complete checkpoint in `ckpt_path`, else the path of a `global_step_N` folder."""
    resume_allow_changes: bool = False
    """Whether data, batch size, sampler, weights, seed or optimizer may differ from the checkpoint's."""
    resume_weights_only: bool = False
    """Whether to take only the weights from the checkpoint and start at step 0."""
    hf_save_interval: int = Field(default=0, ge=0)
    """Steps between Hugging Face exports, also at the end; 0 exports none."""
    export_path: str = ""
    """Where these go as `global_step_N/`; empty is `{ckpt_path}/hf_exports`."""
    shutdown_grace_seconds: int = Field(default=600, ge=0)
    """Seconds our launcher waits for a save after SIGTERM."""


class TorchProfilerConfig(Section):
    """What the torch profiler records, and when."""

    enable: bool = False
    """Whether steps are profiled by torch."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks that write traces."""
    save_path: str = ""
    """Local folder of the traces; empty is `{log_dir}/{run_name}/profile`."""
    skip_first: int = Field(default=0, ge=0)
    """Steps before the first cycle of `wait`, `warmup` and `active` steps."""
    wait: int = Field(default=1, ge=0)
    """Steps of a cycle that are not recorded."""
    warmup: int = Field(default=1, ge=0)
    """Steps after these that are recorded and thrown away."""
    active: int = Field(default=3, ge=1)
    """Steps after these that one trace holds."""
    repeat: int = Field(default=1, ge=0)
    """Cycles, each with a trace; 0 goes on to the end."""
    activities: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    """What is recorded; `cuda` only where there is a GPU."""
    record_shapes: bool = False
    """Whether to record the shapes of inputs."""
    profile_memory: bool = False
    """Whether to record what is allocated and freed."""
    with_stack: bool = False
    """Whether to record the lines of source that called."""
    with_flops: bool = False
    """Whether to count the operations of matrix products."""
    export_type: Literal["chrome_trace", "stacks"] = "chrome_trace"
    """A trace for Perfetto or chrome://tracing, or stacks for a flame graph, which need `with_stack`."""


class LogKeys(Section):
    """Logging and profiling"""

    log_dir: str = "runs"
    """`{log_dir}/{run_name}/` holds metrics.jsonl, the effective config and the report."""
    logger: tuple[TrackerName, ...] = (TrackerName.CONSOLE,)
    """Where metrics are shown; metrics.jsonl is always written."""
    project_name: str = "burnish"
    """Project the trackers file the run under."""
    run_name: str = "sft"
    """Name of the run."""
    tags: tuple[str, ...] = ()
    """Tags the trackers put on the run."""
    torch_profiler_config: TorchProfilerConfig = TorchProfilerConfig()
    record_memory: bool = False
    """Whether each rank writes a history of its GPU's memory into the run's folder, at the end or when memory runs out."""
