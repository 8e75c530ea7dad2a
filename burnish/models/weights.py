"""A model without weights gets those of a folder or hub id, from its safetensors.

Its rule: of a parameter that is spread over ranks, a rank reads and holds its own rows; names and layouts are translated
by transformers itself, so that the weights are those of ``from_pretrained``.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from burnish.log import get_logger
from burnish.models.load import path_problem

log = get_logger(__name__)

Stored: TypeAlias = Mapping[str, Any]
"""What is read when it is sliced, by name."""
_LAYER = re.compile(r".*?\.\d+\.|")
_BELONG = "name a folder whose config.json and *.safetensors belong together"


def read_weights(model: Any, path: str, *, device: torch.device, blank: Callable[[], Any]) -> None:
    """Fill the parameters and buffers of ``model``, in place, with those of ``path``. No rank waits for another.

    Args:
        model: of ``transformers``, on meta; some or all of its parameters may be spread over ranks by their rows.
        path: folder or hub id.
        device: where parameters and buffers go.
        blank: makes another such model on meta, not spread.

    Raises:
        ConfigError: there are no such weights, or they are not those of this model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    conversions: Any = get_model_conversion_mapping(model)
    settings = LoadStateDictConfig(dtype=model.dtype, device_map={"": device}, weight_mapping=conversions)

    def load(target: Any, stored: Stored) -> Any:
        return convert_and_load_state_dict_in_model(target, dict(stored), settings)[0]

    shared = _shared(model)
    with opened(path) as stored:
        whole = not _rows_come_from_rows(conversions, model)
        reports = _load_by_layers(model, stored, double=blank(), load=load) if whole else [load(model, stored)]
    # An export translates back by them.
    model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
    absent = set.intersection(*(report.missing_keys for report in reports))
    unfit = {name for report in reports for name, *_ in report.mismatched_keys}
    if unfit := unfit.union(*(report.conversion_errors for report in reports)):
        raise path_problem(path, f"its weights {_some(unfit)} are not those of its config.json", fix=_BELONG)
    _share(model, shared, absent=absent, path=path)
    if lacking := absent & {name for name, _ in model.named_parameters()}:
        raise path_problem(path, f"its weights lack {_some(lacking)}", fix=_BELONG)
    if surplus := set().union(*(report.unexpected_keys for report in reports)):
        log.info("%s: %s have no place in %s and are not read", path, _some(surplus), type(model).__name__)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            _put(model, name, torch.empty_like(buffer, device=device))
    # What is not stored is worked out from the config, such as the frequencies of rotary positions.
    model.initialize_weights()


@contextmanager
def opened(path: str) -> Iterator[Stored]:
    """The weights of ``path``, a folder or hub id.

    Raises:
        ConfigError: there are none.
    """
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(file, framework="pt")) for file in _files(path)]
        except (OSError, SafetensorError) as error:
            problem = f"its weights cannot be read: {str(error).strip().splitlines()[0]}"
            raise path_problem(path, problem, fix="name a folder with whole *.safetensors") from error
        yield {name: _Copied(file.get_slice(name)) for file in files for name in file.keys()}  # noqa: SIM118


class _Copied:
    """A stored tensor whose slices have memory of their own: the file may be written to while they are trained."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, part: Any) -> Tensor:
        copied: Tensor = self._stored[part].clone()
        return copied


def _files(path: str) -> list[str]:
    """The files of the weights, as ``from_pretrained`` chooses them; of a hub id, brought to this machine."""
    from transformers.utils import hub

    quiet: Any = {"_raise_exceptions_for_missing_entries": False}
    if single := hub.cached_file(path, "model.safetensors", **quiet):
        return [single]
    index = hub.cached_file(path, "model.safetensors.index.json")
    return list(hub.get_checkpoint_shard_files(path, index)[0])  # type: ignore[no-untyped-call]


def _rows_come_from_rows(conversions: list[Any], model: Any) -> bool:
    """Whether a rank's rows of every parameter are made of the same rows of what is stored."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    spread = [p for p in model.parameters() if isinstance(p, DTensor)]
    operations = [op for made in conversions if isinstance(made, WeightConverter) for op in made.operations]
    if not spread or not operations:
        return True
    # Transformers cannot stack the experts of a rank that holds none.
    return all(p.to_local().numel() for p in spread) and all(
        (isinstance(op, MergeModulelist) and op.dim == 0) or (isinstance(op, Concatenate) and op.dim > 0)
        for op in operations
    )


def _load_by_layers(model: Any, stored: Stored, *, double: Any, load: Callable[[Any, Stored], Any]) -> list[Any]:
    """Read a layer at a time into ``double``, whole, and move this rank's rows to ``model``."""
    reports = []
    for _, names in groupby(sorted(stored, key=_layer), key=_layer):
        reports.append(load(double, {name: stored[name] for name in names}))
        for name, tensor in [*double.named_parameters(), *double.named_buffers()]:
            if not tensor.is_meta:
                _put(model, name, _own_rows(tensor.detach(), like=model.get_parameter_or_buffer(name)), is_read=True)
                _put(double, name, tensor.detach().to("meta"))
    return reports


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else ""


def _own_rows(whole: Tensor, *, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return whole
    # A copy: a view would hold the whole in memory.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).clone()


def _shared(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [group for group in names.values() if len(group) > 1]


def _share(model: Any, shared: list[list[str]], *, absent: set[str], path: str) -> None:
    """Make one parameter again of all names in each group; of those, one has to be stored."""
    for names in shared:
        read = [name for name in names if name not in absent]
        if not read:
            continue
        first, *others = [model.get_parameter(name) for name in read]
        if any(not torch.equal(_local(first), _local(other)) for other in others):
            fix = "write tie_word_embeddings: false into its config.json"
            raise path_problem(path, f"its config ties {' and '.join(read)}, but both are stored and differ", fix=fix)
        for name in names:
            _put(model, name, first)
        absent.difference_update(names)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _put(model: Any, name: str, tensor: Tensor, *, is_read: bool = False) -> None:
    place, _, own = name.rpartition(".")
    module = model.get_submodule(place)
    if own in module._parameters and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=module._parameters[own].requires_grad)
    if is_read:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, own, tensor)


def _some(names: set[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
