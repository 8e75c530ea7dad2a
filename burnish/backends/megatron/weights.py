"""Weights of a Hugging Face folder become those of Megatron's model on every rank, and such a folder again.

Every parameter of a rank is one run after another of tensors as they are stored (:func:`_runs`); reading, gathering and
writing all follow from that. Its rule: a rank holds its own share, and of the rest one tensor at a time; of an export,
one file.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor

from burnish.backends.comm import Ranks
from burnish.backends.megatron.sizes import Sizes
from burnish.models.load import path_problem
from burnish.models.weights import opened

FILE_BYTES = 4 * 2**30
"""Bytes of an exported file, about; rank 0 holds as much."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BELONG = "name a folder whose config.json and *.safetensors belong together"

_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Of a layer, what every rank holds whole, with the norms where Megatron's parts and those of Transformer Engine keep
them."""
_LONG = re.compile(r"^model\.(?:language_(model\.)|(visual\.))")
"""What newer folders of models that take images have at the front of a name."""
_SHORT = re.compile(r"^(?:model|visual)\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+)\.weight|(\w+)\.weight(\d+))")


@dataclass(frozen=True, slots=True)
class Run:
    """Part of a stored tensor."""

    name: str
    dim: int
    """The dimension that is cut; of the others, all."""
    start: int
    stop: int

    def of(self, stored: Any) -> Tensor:
        """This part of ``stored``, a tensor or what is read when it is sliced."""
        part: Tensor = stored[self.start : self.stop] if self.dim == 0 else stored[:, self.start : self.stop]
        return part


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of this rank's, and where all ranks' shares of it come from."""

    value: torch.nn.Parameter
    group: Any
    """The ranks that hold the shares."""
    shares: tuple[tuple[Run, ...], ...]
    """Of each of them: runs that lie in its share one after another; what is left of it is padding."""

    @property
    def own(self) -> tuple[Run, ...]:
        """Of this rank."""
        return self.shares[self.group.rank()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each stored tensor that it is part of."""
        shapes: dict[str, tuple[int, ...]] = {}
        for run in (run for share in self.shares for run in share):
            shape = list(self.value.shape)
            shape[run.dim] = max(run.stop, shapes[run.name][run.dim] if run.name in shapes else 0)
            shapes[run.name] = tuple(shape)
        return shapes


def load_weights(models: Sequence[Any], path: str | Path, *, hf_config: Any, sizes: Sizes) -> None:
    """Fill all parameters of ``models``, in place. No rank waits for another, and each reads its own shares only.

    Args:
        models: this rank's, of ``build_model``.
        path: folder or hub id.
        hf_config: its config.
        sizes: how the models were cut.

    Raises:
        ConfigError: there are no such weights, or they are not those of this model.
    """
    with opened(str(path)) as found, torch.no_grad():
        stored = {_LONG.sub(r"\1\2", name): tensor for name, tensor in found.items()}
        if hf_config.tie_word_embeddings and _HEAD in stored and _EMBEDDING in stored:
            _require_equal(stored, path=str(path))
        for _, parameter in _named(models, hf_config=hf_config, sizes=sizes):
            _fill(parameter, stored, path=str(path))


def hf_named(
    models: Sequence[Any],
    *,
    hf_config: Any,
    sizes: Sizes,
    tensor_of: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of this rank's stage, one after another, under the names of Hugging Face.

    All ranks of a tensor parallel or expert group have to ask for as many. A tied head is not among them.

    Args:
        models: this rank's, wrapped or not.
        hf_config: of ``transformers``.
        sizes: how the models were cut.
        tensor_of: what is gathered of a parameter, in its shape: the weight, or its gradient.
    """
    for parameter in _exported(models, hf_config=hf_config, sizes=sizes):
        share = tensor_of(parameter.value).contiguous()
        gathered = [torch.empty_like(share) for _ in parameter.shares]
        dist.all_gather(gathered, share, group=parameter.group)
        wholes = {name: share.new_empty(shape) for name, shape in parameter.shapes().items()}
        for part, runs in zip(gathered, parameter.shares, strict=True):
            for run, place in _laid(part, runs):
                run.of(wholes[run.name]).copy_(place)
        yield from wholes.items()


def export_weights(
    models: Sequence[Any], folder: Path, *, ranks: Ranks, hf_config: Any, sizes: Sizes, dtype: torch.dtype
) -> None:
    """Write the weights into ``folder`` as safetensors; all ranks call it, and rank 0 writes.

    Args:
        models: this rank's, wrapped or not.
        folder: made if it is missing.
        ranks: all of them.
        hf_config: of ``transformers``.
        sizes: how the models were cut.
        dtype: what floating-point weights are written in.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    speaks = not any(
        (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    )
    listed = [
        shape for p in _exported(models, hf_config=hf_config, sizes=sizes) for shape in p.shapes().items() if speaks
    ]
    shapes_of = ranks.gather(listed)
    files = _Files(folder, long_names=hf_config.model_type == "qwen3_vl_text") if ranks.rank == 0 else None
    for number, source in enumerate(rank for rank, shapes in enumerate(shapes_of) if shapes):
        # Later stages wait without a time-out for the earlier ones to be written.
        ranks.meet(f"export/{folder}/{number}")
        if stage == number:
            for name, tensor in hf_named(models, hf_config=hf_config, sizes=sizes):
                if files:
                    files.add(name, tensor.to(dtype))
                elif speaks:
                    dist.send(tensor.to(dtype), dst=0)
        elif files:
            for name, shape in shapes_of[source]:
                tensor = torch.empty(shape, dtype=dtype, device=ranks.device)
                dist.recv(tensor, src=source)
                files.add(name, tensor)
    if files:
        files.close()


class _Files:
    """Tensors, as they come, become files of about one size and their index."""

    def __init__(self, folder: Path, *, long_names: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.long_names = folder, long_names
        self.names: list[list[str]] = []
        self.size = 0
        self.open: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """``tensor`` is written with the others of its file."""
        self.open[_SHORT.sub(_at_length, name) if self.long_names else name] = tensor.cpu().contiguous()
        self.size += tensor.nbytes
        if sum(held.nbytes for held in self.open.values()) >= FILE_BYTES:
            self._write()

    def close(self) -> None:
        """All is written, under the names that ``transformers`` gives such files."""
        if self.open:
            self._write()
        if len(self.names) == 1:
            self._file(0).rename(self.folder / "model.safetensors")
            return
        index: dict[str, str] = {}
        for number, names in enumerate(self.names):
            file = f"model-{number + 1:05}-of-{len(self.names):05}.safetensors"
            self._file(number).rename(self.folder / file)
            index |= dict.fromkeys(names, file)
        content = {"metadata": {"total_size": self.size}, "weight_map": index}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        save_file(self.open, self._file(len(self.names)), metadata={"format": "pt"})
        self.names.append(list(self.open))
        self.open = {}

    def _file(self, number: int) -> Path:
        return self.folder / f"part-{number}.partial"


def _at_length(found: re.Match[str]) -> str:
    return "model.visual." if found[0] == "visual." else "model.language_model."


def _fill(parameter: Parameter, stored: Mapping[str, Any], *, path: str) -> None:
    for name, shape in parameter.shapes().items():
        if name not in stored:
            raise path_problem(path, f"its weights lack {name}", fix=_BELONG)
        found = tuple(stored[name].get_shape())
        if found != shape:
            raise path_problem(path, f"its {name} is {list(found)}, and by its config.json {list(shape)}", fix=_BELONG)
    parameter.value.zero_()  # rows that fill up the vocabulary
    for run, place in _laid(parameter.value, parameter.own):
        place.copy_(run.of(stored[run.name]))


def _laid(share: Tensor, runs: Sequence[Run]) -> Iterator[tuple[Run, Tensor]]:
    """Each of ``runs`` with the part of ``share`` where it lies."""
    ends = accumulate(run.stop - run.start for run in runs)
    for run, end in zip(runs, ends, strict=True):
        length = run.stop - run.start
        yield run, share.narrow(run.dim, end - length, length)


def _require_equal(stored: Mapping[str, Any], *, path: str) -> None:
    if not torch.equal(stored[_HEAD][:], stored[_EMBEDDING][:]):
        message = f"its config ties {_EMBEDDING} and {_HEAD}, but both are stored and differ"
        raise path_problem(path, message, fix="write tie_word_embeddings: false into its config.json")


def _exported(models: Sequence[Any], *, hf_config: Any, sizes: Sizes) -> Iterator[Parameter]:
    """All but the head, where that is the embedding, which another stage holds as well."""
    for name, parameter in _named(models, hf_config=hf_config, sizes=sizes):
        if not (hf_config.tie_word_embeddings and name == "output_layer.weight"):
            yield parameter


def _named(models: Sequence[Any], *, hf_config: Any, sizes: Sizes) -> Iterator[tuple[str, Parameter]]:
    """Each parameter with its name in Megatron."""
    for wrapped in models:
        model = wrapped
        while not isinstance(model, GPTModel):
            model = model.module
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, value in model.named_parameters():
            found = _LAYER.fullmatch(name)
            prefix, own = ("", name) if found is None else (f"model.layers.{layers[int(found[1])]}.", found[2])
            yield name, placed(prefix, own, value=value, hf_config=hf_config, sizes=sizes)


def placed(prefix: str, name: str, *, value: torch.nn.Parameter, hf_config: Any, sizes: Sizes) -> Parameter:
    """Where the shares of a parameter come from.

    Args:
        prefix: of the stored names of its layer; empty outside of layers.
        name: in Megatron, within the layer.
        value: this rank's share; those of the others are of its shape.
        hf_config: of ``transformers``.
        sizes: how the model was cut.
    """
    shares: Iterator[list[Run]]
    if expert := _EXPERT.fullmatch(name):
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        local, matrix = int(expert[1] or expert[4]), f"{expert[2] or expert[3]}.weight"
        held = hf_config.num_experts // sizes.expert
        # The ranks that share one expert lie next to each other.
        places = (divmod(rank, sizes.tensor) for rank in range(group.size()))
        shares = (
            _matrix_runs(f"{prefix}mlp.experts.{number * held + local}.", matrix, value=value, rank=rank)
            for number, rank in places
        )
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        shares = (_runs(prefix, name, value=value, rank=rank, hf_config=hf_config) for rank in range(group.size()))
    return Parameter(value, group, tuple(map(tuple, shares)))


def _runs(prefix: str, name: str, *, value: Tensor, rank: int, hf_config: Any) -> list[Run]:
    """What ``rank`` of a tensor parallel group holds of a parameter; ``value`` is this rank's share, of equal shape."""
    rows = value.shape[0]
    if whole := {**_WHOLE, "decoder.final_layernorm.weight": "model.norm.weight"}.get(name):
        return [Run(prefix + whole, 0, 0, rows)]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        is_head = name == "output_layer.weight" and not hf_config.tie_word_embeddings
        stop = min((rank + 1) * rows, hf_config.vocab_size)
        return [Run(_HEAD if is_head else _EMBEDDING, 0, rank * rows, stop)] if rank * rows < stop else []
    if name.startswith("self_attention.linear_qkv."):
        kind = name.rpartition(".")[2]
        return _head_runs(f"{prefix}self_attn.", kind, start=rank * rows, stop=(rank + 1) * rows, hf_config=hf_config)
    if name.startswith("visual."):
        return [Run(name, 0, 0, rows)]
    if name == "self_attention.linear_proj.weight":
        columns = value.shape[1]
        return [Run(f"{prefix}self_attn.o_proj.weight", 1, rank * columns, (rank + 1) * columns)]
    assert name.startswith("mlp."), f"no place for {name}"
    return _matrix_runs(f"{prefix}mlp.", name.removeprefix("mlp."), value=value, rank=rank)


def _matrix_runs(prefix: str, name: str, *, value: Tensor, rank: int) -> list[Run]:
    """Of the matrices of a layer without attention, or of an expert: gate and up are one, by rows; down, by columns."""
    matrix, _, kind = name.rpartition(".")
    if matrix == "linear_fc1":
        rows = value.shape[0] // 2
        return [Run(f"{prefix}{half}_proj.{kind}", 0, rank * rows, (rank + 1) * rows) for half in ("gate", "up")]
    assert (matrix, kind) == ("linear_fc2", "weight"), f"no place for {name}"
    columns = value.shape[1]
    return [Run(f"{prefix}down_proj.weight", 1, rank * columns, (rank + 1) * columns)]


def _head_runs(prefix: str, kind: str, *, start: int, stop: int, hf_config: Any) -> list[Run]:
    """Rows ``start`` to ``stop`` of query, key and value in one: each key head with its queries before it."""
    facts = hf_config.to_dict()
    groups, heads = facts["num_key_value_heads"], facts["num_attention_heads"]
    width = facts.get("head_dim") or facts["hidden_size"] // heads
    runs, begin = [], 0
    for group in range(groups):
        for matrix, size in (("q", heads // groups * width), ("k", width), ("v", width)):
            first, last = max(start, begin), min(stop, begin + size)
            if first < last:
                shift = group * size - begin
                runs.append(Run(f"{prefix}{matrix}_proj.{kind}", 0, first + shift, last + shift))
            begin += size
    return runs
