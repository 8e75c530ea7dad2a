"""Tokenizing on a Ray cluster, through Ray Data.

The rule: a worker writes what this process would have written, or says why it cannot. Nodes share no disk: the files
come back through Ray, in order and in pieces.
"""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

from burnish.data.tokenize import template_text
from burnish.data.write import RawSource, Shard, ShardWriter, Task, TokenizeJob
from burnish.errors import DataError, LaunchError, StorageError, revived
from burnish.launch.ray import cluster, import_ray
from burnish.storage.cache import private_folder
from burnish.storage.files import is_remote

PIECE_BYTES = 32 * 1024**2
"""What a worker sends at once."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SCHEMA = pa.schema([("piece", pa.large_binary()), ("shard", pa.string()), ("error", pa.string())])
"""Some rows with a piece of the file, then one with what became of the task."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is told."""

    path: str
    source: RawSource
    working_folder: str
    """Where a relative ``path`` begins."""
    is_local: bool
    """Whether ``path`` is a file or folder of the machine, not a URI or a hub id."""
    tokenizer: dict[str, bytes]
    """Its files by name; none when it has no folder."""
    fingerprint: str
    key: str
    """Of the job: a worker whose own differs would write other bytes."""
    fast: bool
    """Whether to use the faster engine."""


def run_on_ray(job: TokenizeJob, tasks: Sequence[Task], fast: bool) -> Iterator[Shard]:
    """Make the files of ``tasks`` on the cluster that Ray finds, else on one of this machine; as ``Runner``.

    Raises:
        DataError: a row cannot be read or tokenized; or a node has not the same rows.
        StorageError: a node cannot read a bucket.
        LaunchError: there is no Ray, or it fails.
    """
    ray = import_ray("data")
    order = make_order(job, fast=fast)
    with cluster(ray):
        try:
            yield from _received(_replies(ray, order, tasks), tasks)
        except ray.exceptions.RayError as error:
            said = str(error).strip().splitlines()[-1]
            raise LaunchError(
                job.path, f"Ray failed ({said})", fix="look into the logs of Ray, and start again"
            ) from error


def make_order(job: TokenizeJob, *, fast: bool) -> Order:
    """All that another node needs to do what ``job`` does, but for the rows."""
    source = job.source.copy()
    settings = source["tokenizer_settings"]
    if settings.chat_template is not None:
        source["tokenizer_settings"] = replace(settings, chat_template=template_text(settings.chat_template))
    folder = Path(settings.model_path)
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    tokenizer = {file.name: file.read_bytes() for file in files if file.suffix not in _WEIGHTS}
    return Order(
        path=job.path,
        source=source,
        working_folder=str(Path.cwd()),
        is_local=not is_remote(job.path) and Path(job.path).expanduser().exists(),
        tokenizer=tokenizer,
        fingerprint=job.fingerprint,
        key=job.key(),
        fast=fast,
    )


def open_order(order: Order, folder: Path) -> ShardWriter:
    """The writer of ``order`` on this node; ``folder`` takes the tokenizer.

    Raises:
        DataError: the rows are not here, or would not become the same bytes.
        StorageError: a bucket cannot be read.
    """
    node = f"on node {platform.node()}"
    if order.is_local and not Path(order.working_folder, Path(order.path).expanduser()).exists():
        fix = "put it under this path on every node, or into a bucket"
        raise DataError(order.path, f"is not {node}", fix=fix)
    if order.is_local and not Path(order.path).expanduser().is_absolute():
        os.chdir(order.working_folder)  # messages show a path as it was given
    source = order.source.copy()
    for name, content in order.tokenizer.items():
        (folder / name).write_bytes(content)
    if order.tokenizer:
        source["tokenizer_settings"] = replace(source["tokenizer_settings"], model_path=str(folder))
    job = TokenizeJob(order.path, source)
    if job.fingerprint != order.fingerprint:
        fix = "copy it to every node anew, or put it into a bucket"
        raise DataError(order.path, f"is another dataset {node} than where the command runs", fix=fix)
    if job.key() != order.key:
        problem = f"would become other tokens {node} than where the command runs"
        raise DataError(
            order.path, problem, fix="install the same versions of Burnish, transformers and Jinja on all nodes"
        )
    return job.writer


class _Worker:
    """Does tasks on one CPU of a node. What a user can mend is sent as text: Ray would wrap it into its own errors."""

    def __init__(self, order: list[Any]) -> None:
        self._order = order
        """A list of the one reference to it: each node fetches it once."""
        self._folder = private_folder()
        self._writer: ShardWriter | None = None

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        (task,) = batch.to_pylist()
        file = self._folder / task["name"]
        try:
            shard = self._open().write((task["start"], task["stop"], file))
        except (DataError, StorageError) as error:
            yield _reply(error=json.dumps(error.to_json()))
            return
        if shard.checksum:
            with file.open("rb") as stream:
                while piece := stream.read(PIECE_BYTES):
                    yield _reply(piece=piece)
            file.unlink()
        yield _reply(shard=json.dumps(asdict(shard)))

    def _open(self) -> ShardWriter:
        if self._writer is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each CPU has a worker
            (order,) = import_ray("data").get(self._order)
            folder = self._folder / "tokenizer"
            folder.mkdir(exist_ok=True)
            self._writer = open_order(order, folder)
            if order.fast:
                self._writer.tokenizer.use_fast_engine()
        return self._writer


def _replies(ray: ModuleType, order: Order, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """What the workers send, in the order of the tasks."""
    if not tasks:
        return
    items = [{"start": start, "stop": stop, "name": file.name} for start, stop, file in tasks]
    data = ray.data.from_items(items, override_num_blocks=len(items))
    data.context.execution_options.preserve_order = True
    data.context.enable_progress_bars = False
    num_workers = max(1, min(len(tasks), int(ray.cluster_resources().get("CPU", 1))))
    replies = data.map_batches(
        _Worker,
        fn_constructor_args=([ray.put(order)],),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        num_cpus=1,
    )
    for batch in replies.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from batch.to_pylist()


def _received(replies: Iterator[dict[str, Any]], tasks: Sequence[Task]) -> Iterator[Shard]:
    """Write the files of ``tasks``; what became of each."""
    for _, _, file in tasks:
        for reply in replies:
            if reply["error"]:
                raise revived(json.loads(reply["error"]))
            if reply["shard"]:
                told = json.loads(reply["shard"])
                yield Shard(**told | {"notices": tuple(told["notices"])})
                break
            with file.open("ab") as stream:
                stream.write(reply["piece"])


def _reply(**values: Any) -> pa.Table:
    return pa.Table.from_pylist([values], schema=_SCHEMA)
