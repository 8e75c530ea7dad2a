"""A micro-batch of arrays becomes what a model is called with, on its device."""

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from burnish.data.batch import IGNORE, Batch, MicroBatch
from burnish.errors import CheckpointError
from burnish.models.attention import Exchange, Segments
from burnish.models.flops import peak_flops
from burnish.models.vision import VisionCard, positions_in_space

MEGATRON_MARK = "megatron.json"
"""A file that stands in a checkpoint of the Megatron backend, and in no other."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""As the config spells them."""


def inputs_ahead(
    micro_batches: Sequence[MicroBatch],
    *,
    device: torch.device,
    exchange: Exchange | None = None,
    vision: VisionCard | None = None,
) -> Iterator[dict[str, Any]]:
    """What ``LossModel`` is called with for each; on a GPU the next is on its way while one is computed."""
    settings: dict[str, Any] = {"device": device, "exchange": exchange, "vision": vision}
    if device.type != "cuda":
        yield from (model_inputs(micro_batch, **settings) for micro_batch in micro_batches)
        return
    way: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: dict[str, Any] | None = None
    for micro_batch in [*micro_batches, None]:
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        now = ahead
        arrived.record(way)
        if micro_batch is not None:
            with torch.cuda.stream(way):
                ahead = model_inputs(micro_batch, **settings)
        if now is not None:
            here = torch.cuda.current_stream(device)
            here.wait_event(arrived)
            for value in now.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(here)
            yield now


def model_inputs(
    micro_batch: MicroBatch,
    *,
    device: torch.device,
    exchange: Exchange | None = None,
    vision: VisionCard | None = None,
) -> dict[str, Any]:
    """The keyword arguments of ``LossModel``: positions restart in each segment; targets are listed, not masked.

    With an ``exchange`` they are of the part of the rows that this rank holds, but for the segments. With the card of a
    tower, ``vision``, positions are those in space, and the images of all rows come one after another.
    """
    segments = Segments.of(micro_batch.segment_ids, exchange)
    held = _held(micro_batch, exchange)
    labels = micro_batch.labels[:, held]
    targets = np.flatnonzero(labels != IGNORE)
    arrays = {
        "input_ids": micro_batch.input_ids[:, held],
        "position_ids": segments.positions()[:, held] if vision is None else in_space(micro_batch, segments, vision),
        "target_positions": targets,
        "target_ids": labels.reshape(-1)[targets],
        "target_sources": micro_batch.segment_sources[:, held].reshape(-1)[targets].astype(np.int64),
        "is_token": micro_batch.segment_ids[:, held] > 0,
    }
    sent = {name: _to_device(array, device) for name, array in {**arrays, **image_arrays(micro_batch)}.items()}
    return {"segments": segments, "num_tokens": int(arrays["is_token"].sum()), **sent}


def target_counts(batch: Batch, *, num_sources: int, exchange: Exchange | None = None) -> NDArray[np.int64]:
    """[num_sources]: the targets of each source that this rank holds."""
    counts = np.zeros(num_sources, np.int64)
    for micro_batch in batch.micro_batches:
        held = _held(micro_batch, exchange)
        sources = micro_batch.segment_sources[:, held][micro_batch.labels[:, held] != IGNORE]
        counts += np.bincount(sources, minlength=num_sources)
    return counts


def require_written_by(strategy: str, *, folder: Path) -> None:
    """That the checkpoint in ``folder`` is one of the backend of ``strategy``.

    Raises:
        CheckpointError: it is one of the other.
    """
    found = "megatron" if (folder / MEGATRON_MARK).is_file() else "fsdp"
    if found != strategy:
        raise CheckpointError(
            str(folder),
            f"was written by strategy={found}, and this run has strategy={strategy}",
            fix=f"resume with strategy={found}, or begin with its weights: burnish export {folder.parent} out=DIR, "
            "and model.path=DIR",
        )


def device_peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations a second of ``device``; None when that is not known."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_peak_gib(device: torch.device) -> float:
    """Most memory held so far: of ``device``, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def image_arrays(micro_batch: MicroBatch) -> dict[str, NDArray[Any]]:
    """The images of all rows one after another, if there are any: ``pixel_values`` and ``image_grid_thw``."""
    if not micro_batch.images:
        return {}
    pixels = np.concatenate([images.pixel_values for images in micro_batch.images]).astype(np.float32)
    return {"pixel_values": pixels, "image_grid_thw": _grids(micro_batch)}


def in_space(micro_batch: MicroBatch, segments: Segments, vision: VisionCard) -> NDArray[np.int64]:
    """[4, rows, length]: :func:`burnish.models.vision.positions_in_space` of a micro-batch."""
    return positions_in_space(micro_batch.input_ids, segments.rows, _grids(micro_batch), card=vision)


def _grids(micro_batch: MicroBatch) -> NDArray[np.int64]:
    return np.concatenate([np.empty((0, 3), np.int64), *(images.grid_thw for images in micro_batch.images)])


def _held(micro_batch: MicroBatch, exchange: Exchange | None) -> slice:
    """The tokens of each row that this rank holds."""
    return slice(None) if exchange is None else exchange.part(micro_batch.input_ids.shape[1])


def _to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # From pinned memory the copy runs beside the computation.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
