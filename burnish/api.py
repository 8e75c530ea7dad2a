"""Burnish for Python: what the command line does, as functions."""

import json
import os
from contextlib import closing
from functools import partial
from pathlib import Path

from burnish.assemble.backend import build_backend
from burnish.assemble.data import raw_columns
from burnish.assemble.model import cache_settings, on_one_rank, require_valid, tokenizer_settings
from burnish.assemble.outputs import run_folder
from burnish.backends.comm import alone, joined
from burnish.bench import measure
from burnish.bench.measure import BenchReport, BenchSettings
from burnish.config import Purpose, SFTConfig
from burnish.config.rules_devices import environment_rank, environment_world
from burnish.data.pictures import ImageReader
from burnish.data.store import Store, open_store
from burnish.data.write import write_store
from burnish.errors import CheckpointError, ConfigError, DataError, Problem
from burnish.inspect import plan
from burnish.inspect.plan import CheckReport
from burnish.launch import local
from burnish.launch import ray as on_ray
from burnish.launch.ray_data import run_on_ray
from burnish.launch.signals import heeded
from burnish.launch.tasks import Outcome
from burnish.log import configure_logging, get_logger
from burnish.models.flops import Device
from burnish.report.page import write_report
from burnish.train.checkpoint import open_checkpoint
from burnish.train.progress import Progress

log = get_logger(__name__)


class SFTTrainer:
    """Trains what a config says, as ``burnish train`` does: ``SFTTrainer(SFTConfig(...)).train()``."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def train(self) -> Progress:
        """Train to the end, launching included.

        Raises:
            BurnishError: the config, the model, the data or a checkpoint is wrong.
            SystemExit: one of several processes failed, with 2 for such an error and 1 for any other; it is on stderr.
        """
        return Progress(**_run(self.config).result)


def train(config: SFTConfig) -> int:
    """``burnish train``: the exit status, 0 or 128 + the signal that ended it."""
    return _run(config).exit_status


def check(config: SFTConfig, *, device: str = "", mfu: float = plan.MFU) -> CheckReport:
    """``burnish check``: every problem, or what the run would do.

    Args:
        config: of the run.
        device: the GPU it is to run on, such as ``h100-80g``; empty is that of this machine.
        mfu: share of the GPU's operations that it is taken to use.

    Raises:
        ConfigError: there is no such device.
    """
    configure_logging(rank=0)
    return plan.check(config, device=Device.named(device) if device else None, mfu=mfu)


def tokenize(config: SFTConfig, *, out: str) -> list[str]:
    """``burnish tokenize``: the training data as stores, one at ``out``, several in folders below it.

    Raises:
        BurnishError: there is nothing to tokenize, a row is wrong, or ``out`` is not empty.
    """
    configure_logging(rank=0)
    card = require_valid(config, purpose=Purpose.TOKENIZE)
    raw = [source for source in config.train_sources if not source.pretokenized]
    if not raw:
        fix = "name chat or Alpaca data in train_datasets"
        raise ConfigError([Problem("train_datasets", config.train_datasets, "holds nothing to tokenize", fix)])
    places = [out] if len(raw) == 1 else [f"{out.rstrip('/')}/{number}" for number in range(len(raw))]
    for source, place in zip(raw, places, strict=True):
        write_store(
            source.path,
            split=source.split,
            tokenizer_settings=tokenizer_settings(config, card),
            num_workers=config.num_workers,
            out=place,
            run=run_on_ray if config.launcher == "ray" else None,
            **cache_settings(config),
            **raw_columns(config),
        )
    return places


def evaluate(config: SFTConfig) -> dict[str, dict[str, float]]:
    """``burnish eval``: ``{name: {loss, perplexity, num_targets}}`` of ``model.path``, or of ``resume_from``.

    Raises:
        BurnishError: the config, the model, the data or the checkpoint is wrong.
        SystemExit: as in :meth:`SFTTrainer.train`.
    """
    return _run(config, purpose=Purpose.EVALUATE).result


def bench(config: SFTConfig, settings: BenchSettings) -> BenchReport:
    """``burnish bench``: throughput of a few steps of ``config`` with random weights."""
    configure_logging(rank=0)
    return measure.bench(config, settings)


def export(checkpoint: str | Path, *, out: Path) -> Path:
    """``burnish export``: the weights of a checkpoint, a path or URI, as a Hugging Face folder.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged; or ``out`` holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"out={out}", "is not empty", fix="name a new folder, or empty this one")
    configure_logging(rank=0)
    folder = open_checkpoint(str(checkpoint), ranks=alone())
    config = on_one_rank(SFTConfig(**json.loads((folder / "config.json").read_text())))
    with joined() as ranks, closing(build_backend(config, ranks=ranks, num_steps=1, num_sources=1)) as backend:
        backend.load(folder / "backend", weights_only=True)
        backend.export(out)
    return out


def load_from_pretokenized(
    path: str | Path,
    *,
    max_length: int | None = None,
    num_embeddings: int | None = None,
    image_token_id: int | None = None,
    image_merge_size: int | None = None,
    image_processor: str | None = None,
    cache_dir: str | None = None,
    force_recache: bool = False,
    disable_cache: bool = False,
) -> Store:
    """Open a store of tokenized rows, checked and memory-mapped: ``len``, ``lengths``, ``target_counts``, ``[i]``.

    Args:
        path: file or folder of Parquet, JSON lines, Arrow, or a ``save_to_disk`` folder; or its s3:// or gs:// URI.
        max_length: tokens a row keeps at most; ``None`` cuts nothing.
        num_embeddings: rows of the model's embedding, which every id must be below; ``None`` skips that check.
        image_token_id: placeholder of an image; ``None`` skips the check of placeholders.
        image_merge_size: patches a placeholder stands for along each side.
        image_processor: folder or hub id of the model whose processor makes pixels of compressed images.
        cache_dir: where converted stores are kept; the user's cache by default.
        force_recache: convert again.
        disable_cache: convert into a private folder that is removed at exit.

    Raises:
        DataError: a row is wrong, or none is left; names the file and the row.
    """
    return open_store(
        path,
        name=str(path),
        max_length=max_length,
        num_embeddings=num_embeddings,
        image_token_id=image_token_id,
        image_merge_size=image_merge_size,
        image_reader=partial(_image_reader, str(path), image_processor),
        cache_dir=cache_dir,
        force_recache=force_recache,
        disable_cache=disable_cache,
    )


def _image_reader(store: str, model_path: str | None) -> ImageReader:
    if model_path is None:
        raise DataError(store, "holds compressed images", fix="give image_processor, the folder of a model")
    return ImageReader(model_path)


def _run(config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN) -> Outcome:
    """By the launcher that ``config`` names, unless this process is a rank already."""
    launch = on_ray.run if config.launcher == "ray" and not environment_world(os.environ) else local.run
    outcome = launch(config, purpose=purpose)
    if purpose is Purpose.TRAIN and environment_rank(os.environ) == 0:
        _report(run_folder(config))
    return outcome


def _report(folder: Path) -> None:
    try:
        with heeded(lambda _: None):  # SIGTERM comes again, or as another rank has ended; SIGKILL is what hurries
            log.info("report: %s", write_report([folder]))
    except Exception as error:  # noqa: BLE001 - the run is over and saved: nothing about its page makes it a failed one
        log.warning("no report was written: %s", error)
