"""The data keys: which rows are trained and evaluated, how they become tokens, and in which order they are drawn."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated, Any, Literal

from pydantic import Field

from burnish.config.choices import TrainOnWhat, Truncation
from burnish.config.section import Section

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_FILE = re.compile(r".*\.(jsonl?|parquet|arrow|gz|zst)", re.IGNORECASE)
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class TrainSource:
    """One dataset or store to train on."""

    path: str
    split: str | None
    """A split or a slice of one, such as ``train[:100]``; none when not given."""
    pretokenized: bool


@dataclass(frozen=True, slots=True)
class EvalSource:
    """One eval set."""

    name: str
    """Its metrics are ``eval/{name}/...``."""
    path: str
    split: str | None
    pretokenized: bool


class DataKeys(Section):
    """Data"""

    train_datasets: tuple[str, ...] = ()
    """Chat or Alpaca data to train on: hub ids, local files or folders, s3:// or gs:// URIs."""
    train_dataset_splits: tuple[str, ...] = ()
    """A split or slice for each of `train_datasets`, such as `train[:100]`; none given is `train`."""
    train_dataset_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Relative share of each source in every window of draws; none given is one pass over all of them."""
    pretokenized_dataset_paths: tuple[str, ...] = ()
    """Stores of tokenized rows to train on, instead of `train_datasets`."""
    eval_datasets: tuple[str, ...] = ()
    """Chat or Alpaca data to evaluate on; each is one eval set."""
    eval_dataset_splits: tuple[str, ...] = ()
    """A split or slice for each of `eval_datasets`."""
    eval_pretokenized_dataset_paths: tuple[str, ...] = ()
    """Stores of tokenized rows to evaluate on; each is one eval set, named after those of `eval_datasets`."""
    eval_dataset_names: tuple[str, ...] = ()
    """A name for each eval set (letters, digits, `.`, `_`, `-`); none given is the last part of its path, extension kept, or its hub id with `/` as `_`."""
    messages_key: str = "messages"
    """Column of the conversation; one given explicitly must exist."""
    tools_key: str = "tools"
    """Column of the tool schemas; one given explicitly must exist."""
    system_key: str = "system"
    """Column of the system prompt; one given explicitly must exist."""
    chat_template: str | None = None
    """A file or a text that replaces the tokenizer's chat template."""
    chat_template_kwargs: Mapping[str, Any] = {}
    """Passed to the chat template."""
    train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    """Which turns of a conversation are trained."""
    max_length: int | None = Field(default=None, ge=2)
    """Most tokens of a row; none is no limit."""
    truncation: Truncation = Truncation.RIGHT
    """What happens to a text row longer than `max_length`: its end is cut off, it is dropped, or the run stops."""
    images: Literal["pixels", "lazy"] = "pixels"
    """What becomes of images in chat rows: their pixels are stored, or their files, which the reading threads make pixels of. No effect on models of text and on stores, which say themselves what they hold."""
    sampler: Literal["random", "sequential", "custom"] = "random"
    """Order of the rows: each once an epoch in random order, as stored, or as a class of your own draws them."""
    sampler_class_path: str | None = None
    """Dotted path of the class for `sampler=custom`."""
    sampler_kwargs: Mapping[str, Any] = {}
    """Passed to that class."""
    seed: int = Field(default=42, ge=0)
    """Decides the order of rows and all dropout."""
    dataloader_num_workers: int = Field(default=0, ge=0)
    """Threads that read rows ahead of the step; the order never depends on it."""
    num_workers: int = Field(default=8, ge=0)
    """Processes that tokenize, at most the cores; 0 tokenizes in this one."""
    cache_dir: str | None = None
    """Folder of downloads and tokenized rows; none is the user's cache."""
    force_recache: bool = False
    """Whether to download and tokenize again what the cache holds."""
    disable_cache: bool = False
    """Whether to use a private folder that is removed at exit."""
    allow_store_mismatch: bool = False
    """Whether a store may have been tokenized with another tokenizer or template than the model's."""

    @property
    def train_sources(self) -> tuple[TrainSource, ...]:
        """What is trained on, in the order given."""
        splits = chain(self.train_dataset_splits, repeat(None))
        raw = (TrainSource(path, split, False) for path, split in zip(self.train_datasets, splits, strict=False))
        return (*raw, *(TrainSource(path, None, True) for path in self.pretokenized_dataset_paths))

    @property
    def eval_sources(self) -> tuple[EvalSource, ...]:
        """The eval sets: those of ``eval_datasets``, then the stores."""
        splits = chain(self.eval_dataset_splits, repeat(None))
        sets = [(path, split, False) for path, split in zip(self.eval_datasets, splits, strict=False)]
        sets += [(path, None, True) for path in self.eval_pretokenized_dataset_paths]
        defaults = [_default_name(path, store=store) for path, _, store in sets]
        names = chain(self.eval_dataset_names, defaults[len(self.eval_dataset_names) :])
        return tuple(EvalSource(name, *rest) for name, rest in zip(names, sets, strict=False))


def _default_name(path: str, *, store: bool) -> str:
    """The name of an eval set that was given none; characters that a name may not have become ``_``.

    ``org/data`` is a hub id (``org_data``) unless it is a store or ends like a data file; ``./org/data`` is a folder.
    """
    if not store and _HUB_ID.fullmatch(path) and not _DATA_FILE.fullmatch(path):
        return path.replace("/", "_")
    return _NOT_IN_NAME.sub("_", path.rstrip("/").rpartition("/")[2])
