"""Rules between the data keys."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from burnish.config.choices import Purpose
from burnish.config.data import EvalSource
from burnish.config.run import Broken, SFTConfig

_NAME = re.compile(r"[._-]*[A-Za-z0-9][A-Za-z0-9._-]*")
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = ("s3", "gs", "gcs")
_HUB_KEYS = ("model.path", "train_datasets", "eval_datasets")
_STORE_KEYS = ("pretokenized_dataset_paths", "eval_pretokenized_dataset_paths")
_OPTIONAL_KEYS = ("ckpt_path", "resume_from", "export_path")
_LOCAL_KEYS = ("cache_dir", "log_dir")


def data_rules(config: SFTConfig, purpose: Purpose) -> Iterator[Broken]:
    """The rules on datasets, stores, eval sets, weights and samplers that ``config`` breaks."""
    yield from _training_data(config, purpose)
    yield from _parallel_lists(config)
    yield from _eval_names(config)
    yield from _sampler(config)
    yield from _places(config)


def paths_in(config: SFTConfig) -> Iterator[tuple[str, str]]:
    """(key, path) of everything that may lie in a bucket."""
    values = dict(config) | {"model.path": config.model.path}
    for key in (*_HUB_KEYS, *_STORE_KEYS, *_OPTIONAL_KEYS):
        for path in values[key] if isinstance(values[key], tuple) else (values[key],):
            yield key, path


def is_bucket(path: str) -> bool:
    """Whether ``path`` is an s3://, gs:// or gcs:// URI."""
    match = _SCHEME.match(path)
    return match is not None and match[1].lower() in _BUCKETS


def _training_data(config: SFTConfig, purpose: Purpose) -> Iterator[Broken]:
    raw, stores = config.train_datasets, config.pretokenized_dataset_paths
    for key, value in (("train_datasets", raw), ("train_dataset_splits", config.train_dataset_splits)):
        if stores and value:
            yield key, "never goes together with pretokenized_dataset_paths", "give one of the two, not both"
    if purpose is Purpose.TRAIN and not (stores or raw or config.dummy_run_full_ctx):
        fix = "name data in train_datasets, or stores in pretokenized_dataset_paths"
        yield "train_datasets", "no training data is named", fix
    if purpose is Purpose.EVALUATE and not config.eval_sources:
        fix = "name data in eval_datasets, or stores in eval_pretokenized_dataset_paths"
        yield "eval_datasets", "no eval set is named", fix
    if purpose is Purpose.TOKENIZE and not (raw or config.eval_datasets):
        yield "train_datasets", "no data to tokenize is named", "name data in train_datasets or eval_datasets"


def _parallel_lists(config: SFTConfig) -> Iterator[Broken]:
    """Lists that go item by item with another one."""
    raw, stores = config.train_datasets, config.pretokenized_dataset_paths
    if not stores:
        yield from _same_count("train_dataset_splits", config.train_dataset_splits, len(raw), "train_datasets")
    sources = len(raw) or len(stores)
    yield from _same_count("train_dataset_weights", config.train_dataset_weights, sources, "training sources")
    sets = len(config.eval_datasets)
    yield from _same_count("eval_dataset_splits", config.eval_dataset_splits, sets, "eval_datasets")
    yield from _same_count("eval_dataset_names", config.eval_dataset_names, len(config.eval_sources), "eval sets")


def _same_count(key: str, values: Sequence[Any], count: int, of_what: str) -> Iterator[Broken]:
    if values and len(values) != count:
        fix = f"give {count} entries, in the order of the {of_what}, or none at all"
        yield key, f"has {len(values)} entries for {count} {of_what}", fix


def _eval_names(config: SFTConfig) -> Iterator[Broken]:
    sources = config.eval_sources
    for source in sources:
        alike = [_described(other) for other in sources if other.name == source.name]
        if not _NAME.fullmatch(source.name):
            message = f"{source.name!r} cannot name the eval set {source.path}"
            yield "eval_dataset_names", message, "use letters, digits, '.', '_' and '-'"
        if len(alike) > 1:
            message = f"{len(alike)} eval sets have the name {source.name!r}: {' and '.join(alike)}"
            yield "eval_dataset_names", message, "give each a name of its own: eval_dataset_names='[first, second]'"


def _described(source: EvalSource) -> str:
    return source.path if source.split is None else f"{source.path} ({source.split})"


def _sampler(config: SFTConfig) -> Iterator[Broken]:
    path, kwargs = config.sampler_class_path, config.sampler_kwargs
    useless = f"has no effect on sampler={config.sampler}"
    if config.train_dataset_weights and config.sampler != "random":
        yield "train_dataset_weights", useless, "leave it out, or sampler=random"
    for key, value in (("sampler_class_path", path), ("sampler_kwargs", kwargs)):
        if value and config.sampler != "custom":
            yield key, useless, "leave it out, or sampler=custom"
    if path is None and config.sampler == "custom":
        yield "sampler_class_path", "is missing for sampler=custom", "give package.module.Class"
    if path is not None and not _CLASS.fullmatch(path):
        yield "sampler_class_path", "is not the dotted path of a class", "write package.module.Class"
    if type(kwargs.get("seed", 0)) is not int:
        yield "sampler_kwargs.seed", "is not a whole number", "write digits without quotes"


def _places(config: SFTConfig) -> Iterator[Broken]:
    """Paths that are empty, or URIs of a kind that is never read."""
    for key, path in paths_in(config):
        scheme = _SCHEME.match(path)
        if not path.strip() and (path or key not in _OPTIONAL_KEYS):
            yield key, "holds an empty path", "give a path"
        if scheme and "@" in path.partition("://")[2].partition("/")[0]:
            yield key, "has a user or a password in it", "give credentials by the environment"
        elif scheme and not is_bucket(path):
            or_hub_id = ", or a hub id" if key in _HUB_KEYS else ""
            yield key, f"{scheme[1]}:// is no place that is read", f"use a local path, s3:// or gs://{or_hub_id}"
    for key in _LOCAL_KEYS:
        folder = dict(config)[key]
        if folder is not None and (not folder.strip() or _SCHEME.match(folder)):
            yield key, "must be a local folder", "give a local path"
    if not config.run_name.strip() or config.run_name.startswith("/") or ".." in config.run_name.split("/"):
        yield "run_name", "cannot name a folder in log_dir", "give a name such as sft"
