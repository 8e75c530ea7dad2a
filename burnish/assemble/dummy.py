"""A run becomes its dummy: the same steps on random rows of full length, which reads and keeps nothing."""

from collections.abc import Mapping
from typing import Any

from burnish.backends.comm import Ranks
from burnish.config import SFTConfig
from burnish.config.loop import GenerateConfig
from burnish.data.random_rows import RandomStore
from burnish.log import get_logger
from burnish.models.load import ModelCard
from burnish.train.callbacks import Callback, Requests
from burnish.train.progress import Progress

log = get_logger(__name__)

_NOTHING_KEPT: Mapping[str, Any] = {
    "train_datasets": (),
    "train_dataset_splits": (),
    "train_dataset_weights": (),
    "pretokenized_dataset_paths": (),
    "sampler": "sequential",
    "eval_datasets": (),
    "eval_dataset_splits": (),
    "eval_pretokenized_dataset_paths": (),
    "eval_dataset_names": (),
    "eval_interval": 0,
    "eval_before_train": False,
    "eval_generate": GenerateConfig(),
    "ckpt_path": "",
    "ckpt_interval": 0,
    "resume_from": "",
    "hf_save_interval": 0,
    "num_epochs": None,
}


def dummy_of(config: SFTConfig) -> SFTConfig:
    """``config`` as it is, or where it asks for a dummy run without data, evaluations and checkpoints."""
    if not config.dummy_run_full_ctx:
        return config
    log.info("a dummy run: random rows of %s tokens, no data, no evaluation, no checkpoint", config.max_length)
    return config.model_copy(update={**_NOTHING_KEPT, "num_steps": config.dummy_run_max_steps})


def dummy_rows(config: SFTConfig, card: ModelCard) -> RandomStore:
    """A step's rows, by number or by tokens: steps of a dummy run all are the same."""
    assert config.max_length is not None
    num_rows = max(1, config.batch_tokens // config.max_length) if config.batch_tokens else config.batch_size
    placeholder = card.vision.image_token_id if card.vision else None
    return RandomStore(num_rows, length=config.max_length, vocabulary=card.num_embeddings, placeholder=placeholder)


class MemorySpoken(Callback):
    """Says at the end what a dummy run is made for."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._peak_gib = ranks, 0.0

    def on_log(self, progress: Progress, requests: Requests, *, metrics: Mapping[str, Any]) -> None:
        """Keep the peak."""
        self._peak_gib = max(self._peak_gib, metrics["train/memory_peak_gib"])

    def on_train_end(self, progress: Progress, requests: Requests) -> None:
        """Say that of the rank that held most."""
        peak_gib = max(self._ranks.gather(self._peak_gib))
        log.info("the dummy run's %d steps held at most %.2f GiB on a rank", progress.step, peak_gib)
