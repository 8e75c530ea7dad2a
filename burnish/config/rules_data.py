"""Rules between the data keys."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from burnish.config.choices import Purpose, SamplerName
from burnish.config.data import EvalSource
from burnish.config.run import SFTConfig
from burnish.errors import Problem

_NAME = re.compile(r"[._-]*[A-Za-z0-9][A-Za-z0-9._-]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = ("s3", "gs", "gcs")
_PATH_KEYS = (
    "train_datasets",
    "pretokenized_dataset_paths",
    "eval_datasets",
    "eval_pretokenized_dataset_paths",
    "ckpt_path",
    "resume_from",
    "export_path",
)
_LOCAL_KEYS = ("cache_dir", "log_dir")


def data_rules(config: SFTConfig, purpose: Purpose) -> Iterator[Problem]:
    """The rules on datasets, stores, eval sets, weights and samplers that ``config`` breaks."""
    yield from _training_data(config, purpose)
    yield from _parallel_lists(config)
    yield from _eval_names(config)
    yield from _weights(config)
    yield from _sampler(config)
    yield from _places(config)


def paths_in(config: SFTConfig) -> Iterator[tuple[str, str]]:
    """(key, path) of everything that may lie in a bucket."""
    yield "model.path", config.model.path
    values = dict(config)
    for key in _PATH_KEYS:
        for path in values[key] if isinstance(values[key], tuple) else (values[key],):
            yield key, path


def is_bucket(path: str) -> bool:
    """Whether ``path`` is an s3://, gs:// or gcs:// URI."""
    match = _SCHEME.match(path)
    return match is not None and match[1].lower() in _BUCKETS


def _training_data(config: SFTConfig, purpose: Purpose) -> Iterator[Problem]:
    stores = config.pretokenized_dataset_paths
    for key, value in (
        ("train_datasets", config.train_datasets),
        ("train_dataset_splits", config.train_dataset_splits),
    ):
        if stores and value:
            yield _problem(
                key, value, "never goes together with pretokenized_dataset_paths", "give one of the two, not both"
            )
    if purpose is Purpose.TRAIN and not (stores or config.train_datasets or config.dummy_run_full_ctx):
        fix = "name data in train_datasets, or stores in pretokenized_dataset_paths"
        yield _problem("train_datasets", config.train_datasets, "no training data is named", fix)
    if purpose is Purpose.EVALUATE and not config.eval_sources:
        fix = "name data in eval_datasets, or stores in eval_pretokenized_dataset_paths"
        yield _problem("eval_datasets", config.eval_datasets, "no eval set is named", fix)
    if purpose is Purpose.TOKENIZE and not (config.train_datasets or config.eval_datasets):
        fix = "name data in train_datasets or eval_datasets"
        yield _problem("train_datasets", config.train_datasets, "no data to tokenize is named", fix)


def _parallel_lists(config: SFTConfig) -> Iterator[Problem]:
    """Lists that go item by item with another one."""
    stores, raw, weights = config.pretokenized_dataset_paths, config.train_datasets, config.train_dataset_weights
    if not stores:
        yield from _same_count("train_dataset_splits", config.train_dataset_splits, len(raw), "train_datasets")
    yield from _same_count("train_dataset_weights", weights, len(raw) or len(stores), "training sources")
    yield from _same_count(
        "eval_dataset_splits", config.eval_dataset_splits, len(config.eval_datasets), "eval_datasets"
    )
    yield from _same_count("eval_dataset_names", config.eval_dataset_names, len(config.eval_sources), "eval sets")


def _same_count(key: str, values: Sequence[Any], count: int, of_what: str) -> Iterator[Problem]:
    if values and len(values) != count:
        message = f"has {len(values)} entries for {count} {of_what}"
        yield _problem(key, values, message, f"give {count} entries, in the order of the {of_what}, or none at all")


def _eval_names(config: SFTConfig) -> Iterator[Problem]:
    sources = config.eval_sources
    for source in sources:
        if not _NAME.fullmatch(source.name):
            message = f"{source.name!r} cannot name the eval set {source.path}"
            yield _problem("eval_dataset_names", source.name, message, "use letters, digits, '.', '_' and '-'")
    for name in dict.fromkeys(source.name for source in sources):
        alike = [_described(source) for source in sources if source.name == name]
        if len(alike) > 1:
            message = f"{len(alike)} eval sets have the name {name!r}: {' and '.join(alike)}"
            fix = "give each a name of its own: eval_dataset_names='[first, second]'"
            yield _problem("eval_dataset_names", config.eval_dataset_names, message, fix)


def _described(source: EvalSource) -> str:
    return source.path if source.split is None else f"{source.path} ({source.split})"


def _weights(config: SFTConfig) -> Iterator[Problem]:
    if config.train_dataset_weights and config.sampler is not SamplerName.RANDOM:
        message = f"has no effect on sampler={config.sampler}"
        yield _problem(
            "train_dataset_weights", config.train_dataset_weights, message, "leave it out, or sampler=random"
        )


def _sampler(config: SFTConfig) -> Iterator[Problem]:
    custom = config.sampler is SamplerName.CUSTOM
    path = config.sampler_class_path
    if custom and path is None:
        yield _problem("sampler_class_path", path, "is missing for sampler=custom", "give package.module.Class")
    if path is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        yield _problem("sampler_class_path", path, "is not the dotted path of a class", "write package.module.Class")
    for key, value in (("sampler_class_path", path), ("sampler_kwargs", config.sampler_kwargs)):
        if value and not custom:
            yield _problem(key, value, f"has no effect on sampler={config.sampler}", "leave it out, or sampler=custom")
    seed = config.sampler_kwargs.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        yield _problem("sampler_kwargs.seed", seed, "is not a whole number", "write digits without quotes")


def _places(config: SFTConfig) -> Iterator[Problem]:
    """Paths that are empty, or URIs of a kind that is never read."""
    optional = ("ckpt_path", "resume_from", "export_path")
    values = dict(config)
    local = ((key, values[key]) for key in _LOCAL_KEYS)
    for key, path in (*paths_in(config), *local):
        if path is None or (path == "" and key in optional):
            continue
        if not path.strip():
            yield _problem(key, path, "holds an empty path", "give a path")
        scheme = _SCHEME.match(path)
        if scheme and key in _LOCAL_KEYS:
            yield _problem(key, path, "must be a local folder", "give a local path")
        elif scheme and not is_bucket(path):
            message = f"{scheme[1]}:// is no place that is read"
            yield _problem(key, path, message, "use a local path, s3:// or gs://" + _or_hub_id(key))
    if not config.run_name.strip() or config.run_name.startswith("/") or ".." in config.run_name.split("/"):
        yield _problem("run_name", config.run_name, "cannot name a folder in log_dir", "give a name such as sft")


def _or_hub_id(key: str) -> str:
    return ", or a hub id" if key in ("model.path", "train_datasets", "eval_datasets") else ""


def _problem(key: str, value: Any, message: str, fix: str) -> Problem:
    return Problem(key, list(value) if isinstance(value, tuple) else value, message, fix)
