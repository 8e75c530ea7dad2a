"""Every key becomes a part of a run: backend, checkpoints, callbacks, trackers, and the trainer that holds them."""

import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from burnish.assemble.data import build_eval_sets, build_stream, count_steps, open_evals, open_train
from burnish.assemble.model import cache_settings, megatron_sizes, plan_layout, require_valid
from burnish.backends.comm import Ranks
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.config import Purpose, SFTConfig
from burnish.config.choices import TrackerName
from burnish.data.store import Store
from burnish.data.stream import BatchStream
from burnish.data.tokenize import template_text
from burnish.errors import ConfigError, DataError, Problem
from burnish.log import get_logger
from burnish.models.flops import step_flops
from burnish.models.load import ModelCard, bring_model
from burnish.models.loss import Objective
from burnish.storage.cache import private_folder, share_private_folder
from burnish.train.cadence import NEVER, Cadence
from burnish.train.callbacks import Callbacks, load_callback
from burnish.train.checkpoint import Checkpointer
from burnish.train.metrics import StepMetrics, short_names
from burnish.train.progress import Progress
from burnish.train.trackers import ConsoleTracker, JsonlTracker, Trackers
from burnish.train.trainer import Exporter, Trainer

if TYPE_CHECKING:
    from burnish.backends.megatron.backend import MegatronBackend

log = get_logger(__name__)


def build_backend(
    config: SFTConfig, *, ranks: Ranks, num_steps: int, num_sources: int
) -> "FsdpBackend | MegatronBackend":
    """The model on its device, with its optimizer."""
    optimizer = config.optimizer_config
    first_beta, second_beta = optimizer.adam_betas
    settings: dict[str, Any] = {
        "ranks": ranks,
        "layout": plan_layout(config, rank=ranks.rank, world_size=ranks.world_size),
        "model_path": bring_model(config.model.path, weights=True, **cache_settings(config)),
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template": template_text(config.chat_template) if config.chat_template else None,
        "objective": Objective(config.label_smoothing, config.z_loss),
        "optimizer": optimizer.name,
        "learning_rate": optimizer.lr,
        "adam_betas": (first_beta, second_beta),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "schedule": optimizer.scheduler,
        "num_warmup_steps": optimizer.num_warmup_steps,
        "min_lr_ratio": optimizer.min_lr_ratio,
        "num_steps": num_steps,
        "num_sources": num_sources,
        "seed": config.seed,
    }
    return _megatron(config, settings) if config.strategy == "megatron" else _fsdp(config, settings)


def _fsdp(config: SFTConfig, settings: Mapping[str, Any]) -> FsdpBackend:
    return FsdpBackend(
        **settings,
        share_rows=config.remove_microbatch_padding,
        attention=config.model.attention,
        activation_checkpointing=config.fsdp_config.activation_checkpointing,
        reshard_after_forward=config.fsdp_config.reshard_after_forward,
        compile_layers=config.fsdp_config.compile,
    )


def _megatron(config: SFTConfig, settings: Mapping[str, Any]) -> "MegatronBackend":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        if config.megatron_config.cpu:
            from burnish.backends.megatron.cpu import install

            install()
        from burnish.backends.megatron.backend import MegatronBackend
    return MegatronBackend(
        **settings,
        sizes=megatron_sizes(config),
        transformer_config_kwargs=config.megatron_config.transformer_config_kwargs,
        optimizer_config_kwargs=config.megatron_config.optimizer_config_kwargs,
    )


def build_callbacks(config: SFTConfig) -> Callbacks:
    """The user's own."""
    return Callbacks([load_callback(path, kwargs=kwargs) for path, kwargs in config.callback_specs])


def build_checkpointer(config: SFTConfig, stores: Sequence[Store], ranks: Ranks) -> Checkpointer:
    """Where the run's checkpoints go, and what must not change between them."""
    plain = config.to_plain()
    keys = ("batch_size", "sampler", "sampler_class_path", "sampler_kwargs", "seed", "train_dataset_weights")
    identity = {
        **{key: plain[key] for key in (*keys, "batch_tokens", "max_length", "truncation", "train_on_what")},
        **{f"optimizer_config.{key}": value for key, value in plain["optimizer_config"].items()},
        **{f"data {number}": store.fingerprint for number, store in enumerate(stores)},
    }
    folder = Path(config.ckpt_path) if config.ckpt_path else None
    return Checkpointer(folder, keep=config.max_ckpts_to_keep, run=identity, config=plain)


def find_start(config: SFTConfig, checkpointer: Checkpointer) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to start from, and its state; no state where only its weights are taken.

    Raises:
        CheckpointError: it is missing, damaged or of another run.
    """
    start = checkpointer.find(config.resume_from)
    if start is None or config.resume_weights_only:
        return start, None
    return start, checkpointer.read(start, allow_changes=config.resume_allow_changes)


def run_folder(config: SFTConfig) -> Path:
    """Where the run's metrics and its config lie."""
    return Path(config.log_dir) / config.run_name


def export_folder(config: SFTConfig) -> Path:
    """Where the run's Hugging Face folders go."""
    return Path(config.export_path) if config.export_path else Path(config.ckpt_path) / "hf_exports"


def require_writable(config: SFTConfig) -> None:
    """Make the folders that the run will write to; a run must not find out at its first save.

    Raises:
        ConfigError: with all that cannot be written.
    """
    places = {"log_dir": run_folder(config)}
    if config.ckpt_path:
        places["ckpt_path"] = Path(config.ckpt_path)
    if config.hf_save_interval:
        places["export_path"] = export_folder(config)
    problems = []
    for key, folder in places.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            message = f"cannot be written: {error.strerror}"
            problems.append(Problem(key, str(folder), message, "give a folder that can be written"))
    if problems:
        raise ConfigError(problems)


@contextmanager
def build_run(config: SFTConfig, *, ranks: Ranks, interrupted: Callable[[], bool]) -> Iterator[Trainer]:
    """A trainer with all its parts, at the place to start from; closed afterwards.

    Raises:
        BurnishError: whatever the user has to mend, wherever it can be known before a device is asked for.
    """
    card = require_valid(config)
    log.info("effective config:\n%s", config.to_yaml())
    if ranks.rank == 0:
        require_writable(config)
    callbacks = build_callbacks(config)
    stores, evals = open_data(config, card, ranks)
    layout = plan_layout(config, rank=ranks.rank, world_size=ranks.world_size)
    stream = build_stream(config, card, stores, layout=layout)
    num_steps = count_steps(config, steps_per_epoch=stream.steps_per_epoch)
    checkpointer = build_checkpointer(config, stores, ranks)
    start, state = find_start(config, checkpointer)
    with ExitStack() as stack:
        backend = build_backend(config, ranks=ranks, num_steps=num_steps, num_sources=len(stores))
        stack.callback(backend.close)
        if start:
            backend.load(start / "backend", weights_only=state is None)
        progress = _restore(state, stream=stream, callbacks=callbacks, num_steps=num_steps)
        trackers = _build_trackers(config, num_steps=num_steps, progress=progress, is_first=ranks.rank == 0)
        stack.callback(trackers.close)
        yield Trainer(
            ranks=ranks,
            backend=backend,
            stream=stream,
            num_steps=num_steps,
            eval_sets=build_eval_sets(config, card, evals, layout=layout),
            eval_at=Cadence(config.eval_interval) if evals else NEVER,
            eval_first=config.eval_before_train,
            checkpointer=checkpointer,
            save_at=Cadence(config.ckpt_interval),
            exporter=_build_exporter(config),
            metrics=StepMetrics(
                source_names=short_names([store.name for store in stores]),
                draws_per_epoch=stream.draws_per_epoch,
                num_ranks=ranks.world_size,
                data_size=layout.data_size,
                flops_of=lambda lengths, targets: step_flops(card, lengths=lengths, num_targets=targets),
                peak_flops=backend.peak_flops,
            ),
            trackers=trackers,
            callbacks=callbacks,
            max_bad_steps=config.max_bad_steps,
            progress=progress,
            interrupted=interrupted,
        )


def open_data(
    config: SFTConfig, card: ModelCard, ranks: Ranks, *, purpose: Purpose = Purpose.TRAIN
) -> tuple[list[Store], dict[str, Store]]:
    """The training stores, none when the ``purpose`` is another, and the evaluation stores by name; alike on all ranks.

    Raises:
        DataError: they are not, or a rank could not open them.
    """
    if config.disable_cache and ranks.world_size > 1:
        share_private_folder(Path(ranks.of_node(lambda: str(private_folder()))))
    stores = open_train(config, card) if purpose is Purpose.TRAIN else []
    evals = open_evals(config, card)
    # One may have waited for hours while another tokenized.
    ranks.meet("data")
    opened = [*stores, *evals.values()]
    found = ranks.gather([platform.node(), *(store.fingerprint for store in opened)])
    for number, store in enumerate(opened, start=1):
        others = [rank for rank, (_, *prints) in enumerate(found) if prints[number - 1] != found[0][number]]
        if others:
            first, other = found[0][0], found[others[0]][0]
            problem = f"holds other rows on rank {others[0]} ({other}) than on rank 0 ({first})"
            raise DataError(store.name, problem, fix="copy it to every node anew, or put it into a bucket")
    return stores, evals


def _restore(state: Mapping[str, Any] | None, *, stream: BatchStream, callbacks: Callbacks, num_steps: int) -> Progress:
    if state is None:
        return Progress()
    progress = Progress(**state["progress"])
    stream.resume(state["cursor"])
    callbacks.load_state_dicts(state["callbacks"])
    log.info("resumed after step %d of %d", progress.step, num_steps)
    if state["num_steps"] != num_steps:
        log.info("the learning rate's horizon is %d steps now; it was %d", num_steps, state["num_steps"])
    return progress


def _build_trackers(config: SFTConfig, *, num_steps: int, progress: Progress, is_first: bool) -> Trackers:
    if not is_first:
        return Trackers([])
    folder = run_folder(config)
    jsonl = JsonlTracker(folder / "metrics.jsonl", resumed=progress.step > 0)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    console = [ConsoleTracker(num_steps=num_steps, first_step=progress.step)]
    return Trackers([jsonl, *(console if TrackerName.CONSOLE in config.logger else [])])


def _build_exporter(config: SFTConfig) -> Exporter | None:
    if config.hf_save_interval == 0:
        return None
    return Exporter(export_folder(config), Cadence(config.hf_save_interval))
