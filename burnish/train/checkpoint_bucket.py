"""Checkpoints in a bucket. Ranks write to the disk of their node; the first rank of each node uploads that behind the run.

An object cannot be renamed, so ``global_step_N/`` counts once it has ``COMPLETE``, which rank 0 writes when every node has
told it, through the ranks' store, what it has sent. ``PARTIAL`` marks what is on its way or being removed, so that what a
kill leaves is known. A node keeps its files until ``COMPLETE`` is there: an upload that was killed can be finished.
"""

import hashlib
import json
import platform
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import torch.distributed as dist

from burnish.backends.comm import Ranks
from burnish.errors import BurnishError, CheckpointError, revived
from burnish.log import get_logger
from burnish.storage.bucket import open_bucket
from burnish.storage.cache import cache_root
from burnish.storage.files import canonical, list_files, read_bytes
from burnish.storage.transfer import clear, fetch, require_space, send
from burnish.train.checkpoint_files import (
    COMPLETE,
    Fact,
    Found,
    complete_text,
    describe,
    folder_name,
    incomplete,
    is_as_described,
    on_disk,
    read_complete,
    step_of,
    write_json,
)

log = get_logger(__name__)

_PARTIAL = "PARTIAL"
_SEALED = ".sealed"
"""Describes what one node holds of a checkpoint that all have written to their disks."""
_POLL_SECONDS = 0.2


class _Sealed(TypedDict):
    save: str
    step: int
    num_nodes: int
    files: dict[str, Fact]


class BucketPlace:
    """Implements :class:`burnish.train.checkpoint.Place` for s3:// and gs://; made on all ranks at the same time."""

    def __init__(self, place: str, *, ranks: Ranks, cache_dir: str | None) -> None:
        self._bucket, self._key = open_bucket(place)
        nodes = ranks.gather(platform.node())
        self._nodes = [nodes.index(node) for node in dict.fromkeys(nodes)]
        """The first rank of each node."""
        self._ranks_here = nodes.count(platform.node())
        self._ranks = ranks
        self._is_first, self._uploads = ranks.rank == 0, ranks.rank in self._nodes
        self._home = staging_folder(canonical(place), cache_dir=cache_dir)
        self._staged = self._home / platform.node()

    def uri(self, name: str = "") -> str:
        """What messages call the checkpoint ``name``, or the whole."""
        return self._bucket.uri(self._object(name))

    def draft(self, step: int) -> Path:
        """Where this node writes its part of the checkpoint of ``step``."""
        return self._staged / folder_name(step)

    def begin(self, step: int, *, contents: Mapping[str, Any], num_bytes: int) -> str:
        """Make room on each node, ``num_bytes`` for each of its ranks; returns what this save is known by.

        Raises:
            StorageError: the disk has not so much.
        """
        if self._uploads:
            with on_disk(self.draft(step)):
                for old in (self._staged, self._home / "objects"):
                    shutil.rmtree(old, ignore_errors=True)
                self.draft(step).mkdir(parents=True)
                require_space(self.draft(step), num_bytes * self._ranks_here)
                if self._is_first:
                    write_json(self.draft(step), contents)
        return uuid.uuid4().hex

    def publish(self, step: int, *, save: str) -> None:
        """Upload what this node has written; return when that of all nodes counts."""
        if self._uploads:
            with on_disk(self.draft(step)):
                sealed = _Sealed(save=save, step=step, num_nodes=len(self._nodes), files=describe(self.draft(step)))
                (self.draft(step) / _SEALED).write_text(json.dumps(sealed))
                self._upload(sealed)

    def abandon(self, step: int) -> None:
        """Remove what was written of ``step``, unless it is whole: then the next start may finish its upload."""
        if self._uploads and not (self.draft(step) / _SEALED).is_file():
            shutil.rmtree(self._staged, ignore_errors=True)

    def list(self) -> Found:
        """What lies there now; whatever is called otherwise is left out."""
        names: dict[str, set[str]] = {}
        for found in self._bucket.list(self._key):
            name, _, rest = found.key.removeprefix(f"{self._key}/" if self._key else "").partition("/")
            if step_of(name) is not None:
                names.setdefault(name, set()).add(rest)
        steps = {name: step for name in names if (step := step_of(name)) is not None}
        whole = {name for name, inside in names.items() if COMPLETE in inside}
        return Found(
            complete=tuple(sorted(steps[name] for name in whole)),
            incomplete={name: step for name, step in steps.items() if name not in whole},
            leftovers=tuple(name for name in steps if name not in whole and _PARTIAL in names[name]),
        )

    def remove(self, name: str) -> None:
        """Remove a checkpoint or a leftover: from the first moment on it does not count."""
        self._mark(name)
        clear(self.uri(name), last=_PARTIAL)

    def recover(self, *, resumed: bool) -> None:
        """Finish the upload of a checkpoint whose run was killed then, if it would be the ``latest`` to be ``resumed``."""
        sealed = self._read_sealed() if resumed and self._uploads else None
        found = self._ranks.gather(sealed and [sealed["save"], sealed["step"], sealed["num_nodes"]])
        of_nodes = [found[rank] for rank in self._nodes]
        if of_nodes[0] is None or any(each != of_nodes[0] for each in of_nodes):
            return
        _, step, num_nodes = of_nodes[0]
        newest = self._ranks.of_first(lambda: max(self.list().complete, default=-1))
        if num_nodes == len(self._nodes) and step > newest:
            log.info("%s: going on with its upload", self.uri(folder_name(step)))
            self._ranks.of_each(lambda: self._upload(sealed) if sealed else None, meeting="checkpoint upload")

    def _read_sealed(self) -> _Sealed | None:
        for file in self._staged.glob(f"global_step_*/{_SEALED}"):
            try:
                sealed: _Sealed = json.loads(file.read_text())
            except ValueError:  # torn by the kill
                continue
            if is_as_described(file.parent, sealed["files"]):
                return sealed
        return None

    def _upload(self, sealed: _Sealed) -> None:
        try:
            self._upload_part(sealed)
        except BurnishError as error:
            self._tell(sealed, "failed", error.to_json())
            raise CheckpointError(error.where, error.problem, fix=error.fix) from error
        shutil.rmtree(self._staged, ignore_errors=True)

    def _upload_part(self, sealed: _Sealed) -> None:
        name, files = folder_name(sealed["step"]), sealed["files"]
        if self._is_first:
            self._mark(name)
            self._tell(sealed, "begun", None)
        self._hear(sealed, "begun")
        send(self.draft(sealed["step"]), self.uri(name), names=sorted(files))
        self._tell(sealed, f"files {self._ranks.rank}", files)
        if self._is_first:
            for rank in self._nodes:
                files = files | self._hear(sealed, f"files {rank}")
                self._ranks.store.delete_key(self._about(sealed, f"files {rank}"))
            self._complete(name, files)
            self._tell(sealed, "complete", None)
        self._hear(sealed, "complete")

    def _mark(self, name: str) -> None:
        """Let ``name`` not count from now on."""
        self._bucket.write(self._object(name, _PARTIAL), b"{}")
        self._bucket.delete(self._object(name, COMPLETE))

    def _complete(self, name: str, files: Mapping[str, Fact]) -> None:
        self._bucket.write(self._object(name, COMPLETE), complete_text(files).encode())
        kept = {self._object(name, each) for each in (*files, COMPLETE)}
        for found in self._bucket.list(self._object(name)):
            if found.key not in kept:  # PARTIAL, and what an earlier save of this step has left
                self._bucket.delete(found.key)

    def _object(self, *parts: str) -> str:
        return "/".join(filter(None, (self._key, *parts)))

    def _tell(self, sealed: _Sealed, what: str, content: Any) -> None:
        self._ranks.store.set(self._about(sealed, what), json.dumps(content))

    def _hear(self, sealed: _Sealed, what: str) -> Any:
        """What a rank told; without a collective and its time-out, as an upload may take hours.

        Raises:
            BurnishError: that of the node that failed.
        """
        wanted, failed = self._about(sealed, what), self._about(sealed, "failed")
        try:
            while not self._ranks.store.check([wanted]):
                if self._ranks.store.check([failed]):
                    raise revived(json.loads(self._ranks.store.get(failed)))
                time.sleep(_POLL_SECONDS)
            return json.loads(self._ranks.store.get(wanted))
        except dist.DistError as error:
            name = self.uri(folder_name(sealed["step"]))
            raise CheckpointError(
                name, "lost contact with the other ranks during its upload", fix="start again"
            ) from error

    def _about(self, sealed: _Sealed, what: str) -> str:
        return f"burnish/save/{sealed['save']}/{what}"


def fetch_checkpoint(place: str, *, cache_dir: str | None) -> Path:
    """The folder on this machine with the files of the checkpoint at ``place``, fetched once.

    Raises:
        CheckpointError: it is not complete.
        StorageError: it cannot be had, or a file differs from its checksum.
    """
    uri = canonical(place)
    complete = next((f for f in list_files(f"{uri}/{COMPLETE}") if f.name == COMPLETE), None)
    if complete is None:
        raise incomplete(uri)
    facts = read_complete(read_bytes(complete).decode(), where=uri)
    hidden = [PurePosixPath(name).name for name in facts]
    files = [file for file in list_files(uri, also=hidden) if file.name in facts or file.name == COMPLETE]
    if missing := sorted(facts.keys() - {file.name for file in files}):
        raise CheckpointError(f"{uri}/{missing[0]}", "is missing", fix="resume from an older checkpoint")
    checksums = {name: fact["sha256"] for name, fact in facts.items()}
    home = staging_folder(uri.rpartition("/")[0], cache_dir=cache_dir)
    return fetch(uri, files, checksums=checksums, cache_dir=home)


def staging_folder(uri: str, *, cache_dir: str | None) -> Path:
    """Where what goes to ``uri``, or comes from there, lies on this machine."""
    return cache_root(cache_dir) / "checkpoints" / hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:32]
