"""What a run writes and where: its folder with metrics, config and data, profiles, and exports."""

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from burnish.assemble.data import image_reader
from burnish.assemble.facts import CONFIG_FILE, write_facts
from burnish.backends.comm import Ranks
from burnish.config import SFTConfig
from burnish.config.choices import TrackerName
from burnish.data.example import ExampleStore
from burnish.data.store import Store
from burnish.errors import ConfigError, Problem, StorageError
from burnish.log import get_logger
from burnish.models.load import ModelCard, read_tokenizer
from burnish.storage.bucket import open_bucket
from burnish.storage.cache import cache_root
from burnish.storage.files import is_remote
from burnish.train.cadence import Cadence
from burnish.train.export import Exporter
from burnish.train.profiling import Profiler, Window
from burnish.train.progress import Progress
from burnish.train.services import RunFacts, open_service
from burnish.train.trackers import METRICS_FILE, ConsoleTracker, JsonlTracker, Tracker, Trackers

log = get_logger(__name__)


def kept_nowhere(config: SFTConfig) -> str:
    """What is to be said of a run that saves no weights; nothing of others."""
    said = "ckpt_path is empty and hf_save_interval 0: the trained weights are kept nowhere"
    return "" if config.ckpt_path or config.hf_save_interval else said


def run_folder(config: SFTConfig) -> Path:
    """Where the run's metrics and its config lie; a dummy run has a folder of its own beside the run's."""
    return Path(config.log_dir) / f"{config.run_name}{'-dummy' if config.dummy_run_full_ctx else ''}"


def export_place(config: SFTConfig) -> str:
    """Where the run's Hugging Face folders go, a path or a URI."""
    return config.export_path or f"{config.ckpt_path.rstrip('/')}/hf_exports"


def require_writable(config: SFTConfig) -> None:
    """Write where the run will write, in folders that are made and in buckets; it must not find out at its first save.

    Of one that will save no weights it says so.

    Raises:
        ConfigError: with all that cannot be written.
    """
    if (said := kept_nowhere(config)) and not config.dummy_run_full_ctx:
        log.warning(said)
    places = {"log_dir": str(run_folder(config))}
    if config.ckpt_path:
        places["ckpt_path"] = config.ckpt_path
    if config.hf_save_interval:
        places["export_path"] = export_place(config)
    if any(map(is_remote, places.values())):
        places["cache_dir"] = str(cache_root(config.cache_dir))
    problems = []
    for key, place in places.items():
        try:
            _try_writing(place)
        except OSError as error:
            message = f"cannot be written: {error.strerror}"
            problems.append(Problem(key, place, message, "give a folder that can be written"))
        except StorageError as error:
            problems.append(Problem(key, place, error.problem, error.fix))
    if problems:
        raise ConfigError(problems)


def _try_writing(place: str) -> None:
    if is_remote(place):
        bucket, key = open_bucket(place)
        probe = f"{key}/.burnish-{uuid.uuid4().hex}".lstrip("/")
        bucket.write(probe, b"{}")
        bucket.delete(probe)
        return
    Path(place).mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=place):
        pass


def build_trackers(
    config: SFTConfig, ranks: Ranks, *, num_steps: int, progress: Progress, state: Mapping[str, Any] | None
) -> Trackers:
    """Those of rank 0, which alone tells; services know a run that goes on from ``state`` as the one it was."""
    identity = state["trackers"] if state else uuid.uuid4().hex
    if ranks.rank:
        return Trackers([], identity=identity)
    folder = run_folder(config)
    jsonl = JsonlTracker(folder / METRICS_FILE, resumed=progress.step > 0)
    (folder / CONFIG_FILE).write_text(config.to_yaml(), encoding="utf-8")
    public = config.to_public()
    facts = RunFacts(
        folder=folder,
        project=public["project_name"],
        name=folder.name,
        identity=identity,
        tags=public["tags"],
        config=public,
        start=progress.step,
        known=jsonl.last_step,
    )
    shown: list[Tracker] = [
        ConsoleTracker(num_steps=num_steps, first_step=progress.step)
        if name is TrackerName.CONSOLE
        else open_service(name, facts)
        for name in config.logger
    ]
    return Trackers([jsonl, *shown], identity=identity)


def note_data(
    config: SFTConfig, card: ModelCard, ranks: Ranks, *, stores: Sequence[ExampleStore], evals: Mapping[str, Store]
) -> None:
    """Rank 0 leaves counts of the data and a few rows in the run's folder; random rows are not worth it."""
    if ranks.rank:
        return
    trusted = config.model.trust_remote_code
    write_facts(
        run_folder(config),
        stores=[store for store in stores if isinstance(store, Store)],
        evals=evals,
        tokenizer=partial(read_tokenizer, card.path, trust_remote_code=trusted),
        reader=partial(image_reader, card.path, trust_remote_code=trusted),
        image_token_id=card.vision.image_token_id if card.vision else None,
        seed=config.seed,
    )


def build_profiler(config: SFTConfig, ranks: Ranks) -> Profiler:
    """Of this rank; of ranks that are not profiled one that does nothing."""
    keys = config.torch_profiler_config
    if not keys.enable or ranks.rank not in keys.ranks:
        return Profiler()
    return Profiler(
        Window(keys.skip_first, keys.wait, keys.warmup, keys.active, keys.repeat),
        folder=Path(keys.save_path) if keys.save_path else run_folder(config) / "profile",
        rank=ranks.rank,
        activities=keys.activities,
        export_type=keys.export_type,
        record_shapes=keys.record_shapes,
        profile_memory=keys.profile_memory,
        with_stack=keys.with_stack,
        with_flops=keys.with_flops,
    )


def build_exporter(config: SFTConfig, ranks: Ranks) -> Exporter | None:
    if config.hf_save_interval == 0:
        return None
    return Exporter(export_place(config), Cadence(config.hf_save_interval), ranks, config.cache_dir)
