"""Megatron's sharded tensors become files of a folder and come back on ranks that are cut otherwise.

Tensors of the whole model, under Megatron's names: of weights and of what the optimizer keeps for them, each rank writes
and reads the parts that it holds, and no rank gathers more. Only tensors are written, by PyTorch DCP, so that there is no
common file to unpickle.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from burnish.backends.comm import Ranks
from burnish.backends.fsdp.tensor_files import DcpSave, TensorReader, cause_of
from burnish.backends.megatron.optimizer import AdamOptimizer
from burnish.backends.megatron.pieces import OPTIMIZER, Held, pieces_of
from burnish.backends.tensors import MEGATRON_MARK, require_written_by
from burnish.errors import CheckpointError

_NAMING = {"non_homogeneous_layers": True, "singleton_local_shards": True}
"""To Megatron: each layer and each expert under a name of its own."""
_NUM_STEPS = f"{OPTIMIZER}num_steps"
_SAME_MODEL = "resume with the model it was made with"


def begin_save(
    models: Sequence[Any], optimizer: AdamOptimizer, folder: Path, *, vocabulary: int, group: dist.ProcessGroup
) -> DcpSave:
    """Copy weights and optimizer state to memory and begin to write them into ``folder``.

    Args:
        models: the parts of the model that this rank holds.
        optimizer: of their weights.
        folder: made if it is missing.
        vocabulary: tokens of the model; rows of the embedding that fill it up are not written.
        group: on the CPU and used for nothing else: the thread's messages must not mix with training's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(models)
    moments = _pieces(optimizer.held(), weights)
    # A copy of the same on the ranks of another dimension may be cut otherwise: one of them writes.
    shards = [*_shards(weights), *(piece for piece in moments if not any(piece.replica_id[:-1]))]
    for shard in shards:
        shard.data = shard.data.detach().to("cpu", copy=True)
    tensors = {**_by_name(shards, vocabulary), _NUM_STEPS: torch.tensor(float(optimizer.num_steps))}
    if dist.get_rank() == 0:
        (folder / MEGATRON_MARK).write_text(json.dumps({"strategy": "megatron"}) + "\n", encoding="utf-8")
    writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = writer.submit(save, tensors, storage_writer=FileSystemWriter(folder), process_group=group)
    writer.shutdown(wait=False)
    return DcpSave(folder, future)


def load_in_place(
    models: Sequence[Any],
    optimizer: AdamOptimizer,
    folder: Path,
    *,
    weights_only: bool,
    vocabulary: int,
    ranks: Ranks,
    group: dist.ProcessGroup,
) -> None:
    """Read what :func:`begin_save` wrote, whatever the ranks held that wrote it.

    Raises:
        CheckpointError: the folder is missing, of another backend or another model, or holds anything but tensors.
    """
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            str(folder), "has no .metadata, so it is not a whole checkpoint", fix="name a complete one"
        )
    require_written_by("megatron", folder=folder)
    reader = TensorReader(folder)
    weights = _weights(models)
    held = [] if weights_only else optimizer.held()
    moments = _pieces(held, weights)
    number = torch.tensor(0.0)
    shards = _shards(weights)
    _require_whole(folder, reader, shards, ranks)
    tensors = _by_name([*shards, *moments], vocabulary) | ({} if weights_only else {_NUM_STEPS: number})
    try:
        load(tensors, storage_reader=reader, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(str(folder), f"does not fit this model: {cause_of(error)}", fix=_SAME_MODEL) from error
    if weights_only:
        optimizer.take_weights()
    else:
        optimizer.restore(held, num_steps=int(number))


def _require_whole(folder: Path, reader: TensorReader, shards: Sequence[ShardedTensor], ranks: Ranks) -> None:
    """That the checkpoint holds a tensor for each of the model's, and no more."""
    stored = [name for name in reader.read_metadata().state_dict_metadata if not name.startswith(OPTIMIZER)]
    # Of the ranks that hold a tensor, or a part of it, one has the part that begins at its origin.
    origins = {s.key for s in shards if is_main_replica(s.replica_id) and not any(s.global_offset)}
    (number,) = ranks.sum([len(origins)])
    if number != len(stored):
        raise CheckpointError(str(folder), f"holds {len(stored)} weights, and the model {number:.0f}", fix=_SAME_MODEL)


def _weights(models: Sequence[Any]) -> dict[int, Any]:
    return {number: model.sharded_state_dict(metadata=dict(_NAMING)) for number, model in enumerate(models)}


def _pieces(held: Sequence[Held], weights: Mapping[int, Any]) -> list[ShardedTensor]:
    """What the optimizer keeps for ``held``; factories have made nothing of ``weights`` yet."""
    found, _ = extract_sharded_tensors_and_factories(dict(weights))
    whole_of = {shard.data: shard for shard in nested_values(found)}
    return [piece for one in held for piece in pieces_of(one, whole_of[one.parameter])]


def _shards(sharded: Any) -> list[ShardedTensor]:
    """Those in the nested ``sharded``, whose factories have made theirs afterwards."""
    apply_factories(sharded)
    # The rest is what Transformer Engine keeps between runs in fp8, as bytes; it finds its scales anew.
    return [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]


def _by_name(shards: Iterable[ShardedTensor], vocabulary: int) -> dict[str, Tensor]:
    """What DCP takes for them: a tensor of which this rank holds some pieces."""
    named: dict[str, list[Tensor]] = {}
    for shard in shards:
        shard.data = shard.data.detach()
        # Megatron's mark of an embedding and all that has its shape.
        piece = _without_padding(shard, vocabulary) if shard.allow_shape_mismatch else shard
        if piece.data.numel():
            named.setdefault(shard.key, []).append(CheckpointableShardedTensor.from_sh_ten(piece))
    return {name: pieces[0] if len(pieces) == 1 else LocalShardsContainer(pieces) for name, pieces in named.items()}


def _without_padding(shard: ShardedTensor, vocabulary: int) -> ShardedTensor:
    """The rows of tokens, with the same memory; how many fill them up depends on the number of ranks, which may change."""
    held = max(0, min(shard.local_shape[0], vocabulary - shard.global_offset[0]))
    shard.data[held:].zero_()
    return replace(
        shard,
        data=shard.data[:held],
        local_shape=(held, *shard.local_shape[1:]),
        global_shape=(vocabulary, *shard.global_shape[1:]),
        axis_fragmentations=None,
    )
