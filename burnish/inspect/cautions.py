"""What is not wrong with a run, but probably not meant: the warnings of ``burnish check``."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from burnish.assemble.model import tokenizer_settings
from burnish.assemble.outputs import kept_nowhere
from burnish.config import SFTConfig
from burnish.data.manifest import require_same
from burnish.data.store import Store
from burnish.errors import DataError, without_secrets
from burnish.inspect.memory import readable_size
from burnish.models.load import ModelCard, read_tokenizer
from burnish.storage.files import is_remote

_SAMPLED = 1000
"""Rows of a source whose targets are looked at, evenly spaced."""
_MANY, _FEW = 0.1, 0.05
"""Shares of rows that are worth a word: dropped or cut, and without an end."""
_OFTEN = 10
"""Passes over a source after which a model mostly learns it by heart."""


def find_cautions(
    config: SFTConfig,
    card: ModelCard,
    *,
    stores: Sequence[Store],
    evals: Mapping[str, Store],
    passes: Sequence[float],
    num_steps: int,
    checkpoint_bytes: int,
) -> list[str]:
    """A sentence on each.

    Args:
        config: of the run, without problems.
        card: of its model.
        stores: the training data, opened.
        evals: the eval sets by name, opened.
        passes: how often the run draws each row of each of ``stores``, on average.
        num_steps: of the run.
        checkpoint_bytes: what a checkpoint takes on a disk.
    """
    found = [
        *(text for store in (*stores, *evals.values()) for text in _of_store(config, card, store)),
        *(text for store in stores for text in _of_ends(config, card, store)),
        # What a sampler of the user's does after its first steps is not known.
        *(_of_passes(stores, passes) if config.sampler != "custom" else ()),
        *_of_overlap(stores, evals),
        *_of_run(config, num_steps=num_steps, checkpoint_bytes=checkpoint_bytes),
    ]
    # The data may be trained and evaluated, and its place hold a password.
    return list(map(without_secrets, dict.fromkeys(found)))


def _of_store(config: SFTConfig, card: ModelCard, store: Store) -> Iterator[str]:
    name, report = store.name, store.report
    if store.manifest is None:
        yield f"{name}: has no manifest, so its tokenizer and chat template are not known to be the model's"
    elif config.allow_store_mismatch:
        try:
            tokenizer = tokenizer_settings(config, card).load()
            require_same(
                name,
                store.manifest,
                tokenizer_hash=tokenizer.tokenizer_hash,
                template_hash=tokenizer.template_hash,
                vocabulary_size=tokenizer.vocabulary_size,
            )
        except DataError as error:
            yield f"{name}: {error.problem}"
    if report.kept < (1 - _MANY) * report.rows:
        yield f"{name}: {report.rows - report.kept:,} of {report.rows:,} rows are dropped"
    if config.max_length and config.truncation == "right":
        full = int((store.lengths == config.max_length).sum())
        if full > _MANY * len(store):
            yield f"{name}: {full:,} of {len(store):,} rows are as long as max_length={config.max_length}, most of them cut"


def _of_ends(config: SFTConfig, card: ModelCard, store: Store) -> Iterator[str]:
    """Rows that are not cut and train no special token, such as the end of a turn."""
    tokenizer = read_tokenizer(card.path, trust_remote_code=config.model.trust_remote_code)
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = np.array(sorted({*added, *tokenizer.all_special_ids}))
    whole = np.flatnonzero(store.lengths != (config.max_length or -1))
    looked_at = whole[np.unique(np.linspace(0, len(whole) - 1, _SAMPLED).astype(np.int64))] if len(whole) else whole
    without = 0
    for row in looked_at.tolist():
        example = store[row]
        without += not np.isin(example.input_ids[1:][example.loss_mask[1:] == 1], special).any()
    if without > _FEW * len(looked_at):
        yield (
            f"{store.name}: {without:,} of {len(looked_at):,} sampled rows train no special token such as "
            f"{tokenizer.eos_token!r}, so that the model does not learn to stop"
        )


def _of_passes(stores: Sequence[Store], passes: Sequence[float]) -> Iterator[str]:
    for store, times in zip(stores, passes, strict=True):
        # A little less than one may be rounding, where a step has no fixed number of rows.
        if times < 0.999:
            yield f"{store.name}: only {times:.1%} of its {len(store):,} rows are drawn; give more steps, or a larger weight"
        if times > _OFTEN:
            yield f"{store.name}: each row is drawn {times:.1f} times"


def _of_overlap(stores: Sequence[Store], evals: Mapping[str, Store]) -> Iterator[str]:
    if not evals:
        return
    trained = np.concatenate([store.row_hashes() for store in stores])
    for name, store in evals.items():
        both = int(np.isin(store.row_hashes(), trained).sum())
        if both:
            yield f"eval set {name}: {both:,} of its {len(store):,} rows are in the training data too"


def _of_run(config: SFTConfig, *, num_steps: int, checkpoint_bytes: int) -> Iterator[str]:
    warmup = config.optimizer_config.num_warmup_steps
    if warmup >= max(1, num_steps):
        yield f"optimizer_config.num_warmup_steps={warmup:g}: the run has {num_steps} steps, and never reaches lr"
    if said := kept_nowhere(config):
        yield said
    if config.ckpt_path and not is_remote(config.ckpt_path):
        place = Path(config.ckpt_path).expanduser().absolute()
        free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
        if free < checkpoint_bytes:
            yield (
                f"ckpt_path={config.ckpt_path}: {readable_size(free)} are free on this machine's disk, and a "
                f"checkpoint takes {readable_size(checkpoint_bytes)}"
            )
