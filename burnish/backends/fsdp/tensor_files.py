"""Tensors by name become files of a folder and come back (PyTorch DCP), on any number of ranks.

Its rule: only tensors. The one pickle, DCP's own ``.metadata``, is read by a reader that admits the classes DCP writes
and nothing else, so a planted file cannot run code.
"""

import pickle
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from burnish.backends.tensors import require_written_by
from burnish.errors import CheckpointError

ADMITTED = frozenset(
    {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
    | {("torch", "Size"), ("torch.serialization", "_get_layout")}
    | {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
    | {("torch", str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    | {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    }
)
"""(module, name) of everything a ``.metadata`` of tensors holds."""


_SAME_MODEL = "resume with the model it was made with, and the same model.lora"


@dataclass(frozen=True, slots=True)
class DcpSave:
    """A save whose tensors are copied already and are being written by a thread."""

    folder: Path
    future: "Future[Metadata]"

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.future.done()

    def wait(self) -> None:
        """Return when every rank has written.

        Raises:
            CheckpointError: something could not be written.
        """
        try:
            self.future.result()
        except RuntimeError as error:
            # Of a collective: an error of a rank itself is one of DCP's own, on all ranks.
            problem = f"was not finished: lost contact with the other ranks ({cause_of(error)})"
            raise CheckpointError(str(self.folder), problem, fix="start again with resume_from=latest") from error
        except (CheckpointException, OSError) as error:
            # torch's own words do not say that a disk is full.
            there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
            free = f"{shutil.disk_usage(there).free / 2**30:.2f} GiB are free"
            raise CheckpointError(
                str(self.folder),
                f"could not be written: {cause_of(error)} ({free} there)",
                fix="see that the disk has room and can be written",
            ) from error


def build_stager(device: torch.device) -> DefaultStager:
    """Copies tensors of ``device`` into memory of the host that it keeps: to find new pages takes longer than to fill them."""
    on_gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )


def begin_save(tensors: dict[str, Any], folder: Path, *, stager: DefaultStager, group: dist.ProcessGroup) -> DcpSave:
    """Copy ``tensors`` (by name, nested as you like) to memory and begin to write them into ``folder``.

    Args:
        tensors: equal names on every rank.
        folder: made if it is missing.
        stager: its memory is written from until the save is done, and must not be filled again before.
        group: on the CPU and used for nothing else: the thread's messages must not mix with training's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    future = async_save(tensors, storage_writer=FileSystemWriter(folder), async_stager=stager, process_group=group)
    assert isinstance(future, Future), "DCP answers otherwise only to a stager with a thread"
    return DcpSave(folder, future)


def load_in_place(tensors: dict[str, dict[str, Any]], folder: Path, *, group: dist.ProcessGroup) -> None:
    """Fill ``tensors``, by kind and name, with what :func:`begin_save` wrote under the same names.

    Raises:
        CheckpointError: the folder is missing, holds anything but tensors, or more or less of a kind than is asked for.
    """
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            str(folder), "has no .metadata, so it is not a whole checkpoint", fix="name a complete one"
        )
    require_written_by("fsdp", folder=folder)
    reader = TensorReader(folder)
    wanted = {f"{kind}.{name}" for kind, named in tensors.items() for name in named}
    stored = {name for name in reader.read_metadata().state_dict_metadata if name.partition(".")[0] in tensors}
    if stored - wanted:
        names = sorted(stored - wanted)
        raise CheckpointError(
            str(folder), f"holds {names[0]} and {len(names) - 1} more that this model has not", fix=_SAME_MODEL
        )
    try:
        load(tensors, storage_reader=reader, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(str(folder), f"does not fit this model: {cause_of(error)}", fix=_SAME_MODEL) from error


class TensorReader(FileSystemReader):
    """DCP's reader of a folder, but for the way it unpickles ``.metadata``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's table of contents.

        Raises:
            CheckpointError: it names a class that no checkpoint of tensors needs.
        """
        file = Path(self.path) / ".metadata"
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(str(file), f"holds a {type(metadata).__name__}", fix="use a checkpoint Burnish wrote")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise CheckpointError(
                ".metadata", f"names {module}.{name}, which no checkpoint holds", fix="use a checkpoint Burnish wrote"
            )
        return super().find_class(module, name)


def cause_of(error: BaseException) -> str:
    """What went wrong on the first rank that failed, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
