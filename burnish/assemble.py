"""Config in, parts out: below the API and the command line, the only reader of an ``SFTConfig``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from burnish.backends.comm import device_type
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.config import EvalSource, Purpose, SFTConfig, TrainSource, find_problems
from burnish.config.choices import TrackerName
from burnish.data.manifest import Manifest, require_same
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, plan_bins, plan_micro_batches
from burnish.data.samplers import DataMixingSampler, RandomSampler, Sampler, SequentialSampler, load_custom_sampler
from burnish.data.store import Store, open_store
from burnish.data.stream import BatchBuilder, BatchStream, EvalBatches
from burnish.data.tokenize import TokenizerSettings, template_text
from burnish.data.write import tokenized_store
from burnish.errors import ConfigError, DataError, Problem
from burnish.log import get_logger
from burnish.models.flops import segment_flops, step_flops
from burnish.models.load import ModelCard, bring_model, read_card
from burnish.models.loss import Objective
from burnish.storage.cache import Caching
from burnish.train.cadence import NEVER, Cadence
from burnish.train.callbacks import Callbacks, load_callback
from burnish.train.checkpoint import Checkpointer
from burnish.train.metrics import StepMetrics, short_names
from burnish.train.progress import Progress
from burnish.train.trackers import ConsoleTracker, JsonlTracker, Trackers
from burnish.train.trainer import Exporter, Trainer

log = get_logger(__name__)


def require_valid(config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN) -> ModelCard:
    """The model's card, once every rule that needs neither weights nor data holds.

    Raises:
        ConfigError: with all broken rules at once.
    """
    if problems := find_problems(config, purpose=purpose):
        raise ConfigError(problems)
    card = model_card(config)
    if problems := model_problems(config, card):
        raise ConfigError(problems)
    return card


def model_card(config: SFTConfig) -> ModelCard:
    """What is known of the model without its weights, which stay in their bucket if they are in one.

    Raises:
        ConfigError: there is no such model, or it cannot be trained.
    """
    folder = bring_model(config.model.path, weights=False, **cache_settings(config))
    return read_card(folder, trust_remote_code=config.model.trust_remote_code)


def model_problems(config: SFTConfig, card: ModelCard) -> list[Problem]:
    """Rules between the config, the model and this machine."""
    problems = []
    attention, on_cpu = config.model.attention, device_type() == "cpu"
    if attention in ("flash", "flex") and on_cpu:
        problems.append(Problem("model.attention", attention, "needs a GPU, and there is none", "write auto"))
    if config.fsdp_config.compile and on_cpu:
        message = "gains next to nothing on a CPU, and there is no GPU"
        problems.append(Problem("fsdp_config.compile", True, message, "leave it out"))
    if config.max_length and card.max_position_embeddings and config.max_length > card.max_position_embeddings:
        fix = f"at most {card.max_position_embeddings}"
        problems.append(Problem("max_length", config.max_length, "is more positions than the model has", fix))
    return problems


def tokenizer_settings(config: SFTConfig, card: ModelCard) -> TokenizerSettings:
    """What decides the tokens of a raw row."""
    return TokenizerSettings(
        model_path=card.path,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
        train_on_what=config.train_on_what,
        max_length=config.max_length,
        truncation=config.truncation,
    )


def open_train(config: SFTConfig, card: ModelCard) -> list[Store]:
    """The training stores in the order given; their rows are checked. Needs no device."""
    return [open_source(config, card, source) for source in config.train_sources]


def open_evals(config: SFTConfig, card: ModelCard) -> dict[str, Store]:
    """The evaluation stores by name."""
    return {source.name: open_source(config, card, source) for source in config.eval_sources}


def open_source(config: SFTConfig, card: ModelCard, source: TrainSource | EvalSource) -> Store:
    """Tokenize ``source`` if it is raw, open the store and check its rows.

    Raises:
        DataError: it is missing, a row is wrong or longer than the model's positions, or no row is left.
    """
    caching = cache_settings(config)
    place = source.path
    if not source.pretokenized:
        place = str(
            tokenized_store(
                source.path,
                split=source.split,
                tokenizer_settings=tokenizer_settings(config, card),
                num_workers=config.num_workers,
                **caching,
                **raw_columns(config),
            )
        )
        caching["force_recache"] = False
    store = open_store(
        place,
        name=source.name if isinstance(source, EvalSource) else source.path,
        max_length=config.max_length,
        truncation=config.truncation,
        num_embeddings=card.num_embeddings,
        admit=None if config.allow_store_mismatch else partial(_require_same_tokens, config, card),
        **caching,
    )
    if store.num_patches.any() and not card.is_vision:
        where = store.locate(int(store.num_patches.argmax()))
        raise DataError(where, f"has images, and {config.model.path} takes none", fix="name a vision-language model")
    longest, positions = int(store.lengths.max()), card.max_position_embeddings
    if positions and longest > positions:
        where = store.locate(int(store.lengths.argmax()))
        problem = f"has {longest} tokens, and the model {positions} positions"
        raise DataError(where, problem, fix=f"give max_length, at most {positions}")
    return store


def _require_same_tokens(config: SFTConfig, card: ModelCard, place: str, manifest: Manifest) -> None:
    """Compare the ``manifest`` of the store at ``place`` with the model."""
    tokenizer = tokenizer_settings(config, card).load()
    require_same(
        place,
        manifest,
        tokenizer_hash=tokenizer.tokenizer_hash,
        template_hash=tokenizer.template_hash,
        vocabulary_size=tokenizer.vocabulary_size,
    )


def cache_settings(config: SFTConfig) -> Caching:
    """Where downloads and what is worked out are kept, and whether they are used."""
    return {
        "cache_dir": config.cache_dir,
        "force_recache": config.force_recache,
        "disable_cache": config.disable_cache,
    }


def raw_columns(config: SFTConfig) -> dict[str, str | None]:
    """The columns of raw rows that were named; a default one may be absent and is ``None``."""
    explicit = config.model_fields_set
    return {
        "messages_key": config.messages_key if "messages_key" in explicit else None,
        "tools_key": config.tools_key if "tools_key" in explicit else None,
        "system_key": config.system_key if "system_key" in explicit else None,
    }


def build_sampler(config: SFTConfig, mixture: Mixture) -> Sampler:
    """The order in which rows are drawn."""
    lengths = [len(store) for store in mixture.stores]
    if config.sampler == "sequential":
        return SequentialSampler(len(mixture))
    if config.sampler == "custom":
        assert config.sampler_class_path is not None
        return load_custom_sampler(
            config.sampler_class_path, dataset=mixture, kwargs=config.sampler_kwargs, source_lengths=lengths
        )
    if config.train_dataset_weights:
        return DataMixingSampler(mixture, lengths=lengths, weights=config.train_dataset_weights, seed=config.seed)
    if len(lengths) > 1:
        log.info("no weights: an epoch is one pass over all %d rows of %d sources", len(mixture), len(lengths))
    return RandomSampler(len(mixture), seed=config.seed)


def build_builder(config: SFTConfig, card: ModelCard, stores: Sequence[Store], *, layout: Layout) -> BatchBuilder:
    """How drawn rows of ``stores`` are dealt to ranks and micro-batches, and laid out."""
    deal: Callable[..., Any] = partial(
        plan_micro_batches,
        micro_batch_size=config.micro_train_batch_size_per_gpu,
        share_row=config.remove_microbatch_padding,
    )
    if config.use_sequence_packing:
        capacity = config.max_tokens_per_microbatch or config.max_length
        assert capacity is not None
        deal = partial(plan_bins, capacity=capacity)
    planner = partial(deal, layout=layout, cost=partial(segment_flops, card=card))
    return BatchBuilder(Mixture(stores), planner=planner, layout=layout, pad_id=card.pad_id)


def build_stream(config: SFTConfig, card: ModelCard, stores: Sequence[Store], *, layout: Layout) -> BatchStream:
    """Training batches, endless."""
    builder = build_builder(config, card, stores, layout=layout)
    return BatchStream(
        builder,
        sampler=build_sampler(config, builder.store),
        batch_size=config.batch_size,
        batch_tokens=config.batch_tokens,
        num_readers=config.dataloader_num_workers,
    )


def build_eval_sets(
    config: SFTConfig, card: ModelCard, evals: Mapping[str, Store], *, layout: Layout
) -> dict[str, EvalBatches]:
    """The evaluation sets by name; their batches are as large as those of the training."""
    of = partial(EvalBatches, batch_size=config.batch_size, batch_tokens=config.batch_tokens)
    return {name: of(build_builder(config, card, [store], layout=layout)) for name, store in evals.items()}


def count_steps(config: SFTConfig, *, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the run: ``num_steps``, or those of ``num_epochs``, or one epoch."""
    if config.num_steps:
        return config.num_steps
    assert steps_per_epoch is not None, "batch_tokens needs num_steps"
    return steps_per_epoch * (config.num_epochs or 1)


def build_backend(config: SFTConfig, *, num_steps: int, num_sources: int) -> FsdpBackend:
    """The model on its device, with its optimizer."""
    optimizer = config.optimizer_config
    first_beta, second_beta = optimizer.adam_betas
    return FsdpBackend(
        model_path=bring_model(config.model.path, weights=True, **cache_settings(config)),
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        chat_template=template_text(config.chat_template) if config.chat_template else None,
        share_rows=config.remove_microbatch_padding,
        attention=config.model.attention,
        objective=Objective(config.label_smoothing, config.z_loss),
        optimizer=optimizer.name,
        learning_rate=optimizer.lr,
        adam_betas=(first_beta, second_beta),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        schedule=optimizer.scheduler,
        num_warmup_steps=optimizer.num_warmup_steps,
        min_lr_ratio=optimizer.min_lr_ratio,
        num_steps=num_steps,
        num_sources=num_sources,
        activation_checkpointing=config.fsdp_config.activation_checkpointing,
        reshard_after_forward=config.fsdp_config.reshard_after_forward,
        compile_layers=config.fsdp_config.compile,
        seed=config.seed,
    )


def build_callbacks(config: SFTConfig) -> Callbacks:
    """The user's own."""
    return Callbacks([load_callback(path, kwargs=kwargs) for path, kwargs in config.callback_specs])


def build_checkpointer(config: SFTConfig, stores: Sequence[Store]) -> Checkpointer:
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
def build_run(config: SFTConfig, *, interrupted: Callable[[], bool]) -> Iterator[Trainer]:
    """A trainer with all its parts, at the place to start from; closed afterwards.

    Raises:
        BurnishError: whatever the user has to mend, wherever it can be known before a device is asked for.
    """
    card = require_valid(config)
    log.info("effective config:\n%s", config.to_yaml())
    require_writable(config)
    callbacks = build_callbacks(config)
    stores, evals = open_train(config, card), open_evals(config, card)
    checkpointer = build_checkpointer(config, stores)
    start, state = find_start(config, checkpointer)
    stream = build_stream(config, card, stores, layout=Layout())
    num_steps = count_steps(config, steps_per_epoch=stream.steps_per_epoch)
    with ExitStack() as stack:
        backend = build_backend(config, num_steps=num_steps, num_sources=len(stores))
        stack.callback(backend.close)
        if start:
            backend.load(start / "backend", weights_only=state is None)
        progress = _restore(state, stream=stream, callbacks=callbacks, num_steps=num_steps)
        trackers = _build_trackers(config, num_steps=num_steps, progress=progress)
        stack.callback(trackers.close)
        yield Trainer(
            backend=backend,
            stream=stream,
            num_steps=num_steps,
            eval_sets=build_eval_sets(config, card, evals, layout=backend.layout),
            eval_at=Cadence(config.eval_interval) if evals else NEVER,
            eval_first=config.eval_before_train,
            checkpointer=checkpointer,
            save_at=Cadence(config.ckpt_interval),
            exporter=_build_exporter(config),
            metrics=StepMetrics(
                source_names=short_names([store.name for store in stores]),
                draws_per_epoch=stream.draws_per_epoch,
                num_ranks=1,
                flops_of=lambda lengths, targets: step_flops(card, lengths=lengths, num_targets=targets),
                peak_flops=backend.peak_flops,
            ),
            trackers=trackers,
            callbacks=callbacks,
            max_bad_steps=config.max_bad_steps,
            progress=progress,
            interrupted=interrupted,
        )


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


def _build_trackers(config: SFTConfig, *, num_steps: int, progress: Progress) -> Trackers:
    folder = run_folder(config)
    jsonl = JsonlTracker(folder / "metrics.jsonl", resumed=progress.step > 0)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    console = [ConsoleTracker(num_steps=num_steps, first_step=progress.step)]
    return Trackers([jsonl, *(console if TrackerName.CONSOLE in config.logger else [])])


def _build_exporter(config: SFTConfig) -> Exporter | None:
    if config.hf_save_interval == 0:
        return None
    return Exporter(export_folder(config), Cadence(config.hf_save_interval))
