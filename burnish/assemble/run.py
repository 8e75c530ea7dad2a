"""Every key becomes a part of a run: data, checkpoints, callbacks, questions, and the trainer that holds them."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from burnish.assemble.backend import build_backend
from burnish.assemble.data import build_eval_sets, build_stream, count_steps, open_evals, open_train
from burnish.assemble.dummy import MemorySpoken, dummy_of, dummy_rows
from burnish.assemble.model import flops_counter, plan_layout, require_valid, tokenizer_settings
from burnish.assemble.outputs import (
    build_exporter,
    build_profiler,
    build_trackers,
    note_data,
    require_writable,
    run_folder,
)
from burnish.backends.comm import Ranks
from burnish.backends.tensors import require_written_by
from burnish.config import Purpose, SFTConfig
from burnish.data.example import ExampleStore
from burnish.data.store import Store
from burnish.data.stream import BatchStream
from burnish.errors import ConfigError, DataError, Problem
from burnish.log import get_logger
from burnish.models.load import ModelCard
from burnish.storage.cache import private_folder, share_private_folder
from burnish.train.cadence import NEVER, Cadence
from burnish.train.callbacks import Callback, Callbacks, load_callback
from burnish.train.checkpoint import Checkpointer
from burnish.train.generation import Questions
from burnish.train.metrics import StepMetrics, short_names
from burnish.train.profiling import recorded_memory
from burnish.train.progress import Progress
from burnish.train.trainer import Trainer

log = get_logger(__name__)


def build_callbacks(config: SFTConfig, *, own: Sequence[Callback] = ()) -> Callbacks:
    """The user's, after our ``own``."""
    return Callbacks([*own, *(load_callback(path, kwargs=kwargs) for path, kwargs in config.callback_specs)])


def build_questions(config: SFTConfig, card: ModelCard) -> Questions | None:
    """What is asked in evaluations, as the model's chat template writes it.

    Raises:
        ConfigError: the model has fewer positions than a prompt and its answer take.
        DataError: there is no chat template, or it cannot render a prompt.
    """
    keys = config.eval_generate
    if not keys.prompts:
        return None
    tokenizer = tokenizer_settings(config, card).load()
    token_ids = [tokenizer.encode_prompt(prompt) for prompt in keys.prompts]
    longest, positions = max(map(len, token_ids)) + keys.max_new_tokens, card.max_position_embeddings
    if positions and longest > positions:
        message = f"the longest takes {longest} tokens with its answer, and the model has {positions} positions"
        fix = "ask less, or lower eval_generate.max_new_tokens"
        raise ConfigError([Problem("eval_generate.prompts", list(keys.prompts), message, fix)])
    return Questions(keys.prompts, token_ids, tokenizer.decode, Cadence(keys.every), keys.max_new_tokens)


def build_checkpointer(config: SFTConfig, stores: Sequence[ExampleStore], ranks: Ranks) -> Checkpointer:
    """Where the run's checkpoints go, and what must not change between them."""
    plain = config.to_plain()
    keys = ("batch_size", "sampler", "sampler_class_path", "sampler_kwargs", "seed", "train_dataset_weights")
    identity = {
        **{key: plain[key] for key in (*keys, "batch_tokens", "max_length", "truncation", "train_on_what")},
        **{f"optimizer_config.{key}": value for key, value in plain["optimizer_config"].items()},
        **{f"model.lora.{key}": value for key, value in plain["model"]["lora"].items() if config.model.lora.rank},
        **{f"data {number}": store.fingerprint for number, store in enumerate(stores)},
    }
    settings: dict[str, Any] = {"keep": config.max_ckpts_to_keep, "cache_dir": config.cache_dir}
    return Checkpointer(config.ckpt_path, ranks=ranks, run=identity, config=plain, **settings)


def find_checkpoint(config: SFTConfig, checkpointer: Checkpointer) -> Path | None:
    """The checkpoint that ``resume_from`` names, if one is to be read.

    Raises:
        CheckpointError: it is missing, damaged or of the other strategy.
    """
    checkpoint = checkpointer.find(config.resume_from)
    if checkpoint:
        require_written_by(config.strategy, folder=checkpoint / "backend")
    return checkpoint


def find_start(config: SFTConfig, checkpointer: Checkpointer) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to start from, and its state; no state where only its weights are taken.

    Raises:
        CheckpointError: as of :func:`find_checkpoint`, or it is of another run.
    """
    checkpointer.recover(config.resume_from)
    if not config.resume_from:
        checkpointer.begin_afresh()
    start = find_checkpoint(config, checkpointer)
    if start is None or config.resume_weights_only:
        return start, None
    return start, checkpointer.read(start, allow_changes=config.resume_allow_changes)


@contextmanager
def build_run(config: SFTConfig, *, ranks: Ranks, interrupted: Callable[[], bool]) -> Iterator[Trainer]:
    """A trainer with all its parts, at the place to start from; closed afterwards.

    Raises:
        BurnishError: whatever the user has to mend, wherever it can be known before a device is asked for.
    """
    card, config = require_valid(config), dummy_of(config)
    log.info("effective config:\n%s", config.to_yaml())
    if ranks.rank == 0:
        require_writable(config)
    callbacks = build_callbacks(config, own=[MemorySpoken(ranks)] if config.dummy_run_full_ctx else [])
    questions = build_questions(config, card)
    stores, evals = open_data(config, card, ranks)
    layout = plan_layout(config, rank=ranks.rank, world_size=ranks.world_size)
    stream = build_stream(config, card, stores, layout=layout)
    num_steps = count_steps(config, steps_per_epoch=stream.steps_per_epoch)
    checkpointer = build_checkpointer(config, stores, ranks)
    start, state = find_start(config, checkpointer)
    with ExitStack() as stack:
        if config.record_memory:
            stack.enter_context(recorded_memory(run_folder(config), ranks=ranks))
        backend = build_backend(config, ranks=ranks, num_steps=num_steps, num_sources=len(stores))
        stack.callback(backend.close)
        if start:
            backend.load(start / "backend", weights_only=state is None)
        progress = _restore(state, stream=stream, callbacks=callbacks, num_steps=num_steps)
        note_data(config, card, ranks, stores=stores, evals=evals)
        trackers = build_trackers(config, ranks, num_steps=num_steps, progress=progress, state=state)
        stack.push(lambda kind, *_: trackers.close(failed=kind is not None))
        yield Trainer(
            ranks=ranks,
            backend=backend,
            stream=stream,
            num_steps=num_steps,
            eval_sets=build_eval_sets(config, card, evals, layout=layout),
            eval_at=Cadence(config.eval_interval) if evals or questions else NEVER,
            eval_first=config.eval_before_train,
            questions=questions,
            checkpointer=checkpointer,
            save_at=Cadence(config.ckpt_interval),
            exporter=build_exporter(config, ranks),
            profiler=build_profiler(config, ranks),
            metrics=_step_metrics(config, card, stores, stream=stream, ranks=ranks, peak_flops=backend.peak_flops),
            trackers=trackers,
            callbacks=callbacks,
            max_bad_steps=config.max_bad_steps,
            progress=progress,
            interrupted=interrupted,
        )


def open_data(
    config: SFTConfig, card: ModelCard, ranks: Ranks, *, purpose: Purpose = Purpose.TRAIN
) -> tuple[Sequence[ExampleStore], dict[str, Store]]:
    """The training stores, none when the ``purpose`` is another, and the evaluation stores by name; alike on all ranks.

    Raises:
        DataError: they are not, or a rank could not open them.
    """
    if config.disable_cache and ranks.world_size > 1:
        share_private_folder(Path(ranks.of_node(lambda: str(private_folder()))))
    stores: Sequence[ExampleStore] = _open_train(config, card) if purpose is Purpose.TRAIN else []
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


def _open_train(config: SFTConfig, card: ModelCard) -> Sequence[ExampleStore]:
    return [dummy_rows(config, card)] if config.dummy_run_full_ctx else open_train(config, card)


def _step_metrics(
    config: SFTConfig,
    card: ModelCard,
    stores: Sequence[ExampleStore],
    *,
    stream: BatchStream,
    ranks: Ranks,
    peak_flops: float | None,
) -> StepMetrics:
    return StepMetrics(
        source_names=short_names([store.name for store in stores]),
        draws_per_epoch=stream.draws_per_epoch,
        num_ranks=ranks.world_size,
        data_size=plan_layout(config, rank=ranks.rank, world_size=ranks.world_size).data_size,
        flops_of=flops_counter(config, card),
        peak_flops=peak_flops,
    )


def _restore(state: Mapping[str, Any] | None, *, stream: BatchStream, callbacks: Callbacks, num_steps: int) -> Progress:
    if state is None:
        return Progress()
    progress = Progress(**state["progress"])
    stream.resume(state["cursor"])
    callbacks.load_state_dicts(state["callbacks"])
    log.info("resumed after step %d of %d", progress.step, num_steps)
    if progress.step >= num_steps:
        log.info("there is nothing left to do; to go on, give more num_steps or num_epochs")
    if state["num_steps"] != num_steps:
        log.info("the learning rate's horizon is %d steps now; it was %d", num_steps, state["num_steps"])
    return progress
