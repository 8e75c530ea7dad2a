"""The linear layers of a model by name, and those of them that get adapters."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from burnish.errors import ConfigError, Problem

ALL_LINEAR = "all-linear"
"""The name in ``model.lora.target_modules`` that fits every linear layer."""


def linear_layers(model: Any) -> dict[str, nn.Module]:
    """The linear layers of a ``transformers`` model by name, the head not among them."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def adapted_layers(linear: Iterable[str], *, targets: Sequence[str], excluded: Sequence[str]) -> tuple[str, ...]:
    """Those of the layers ``linear`` that get an adapter.

    A name fits a layer that is called so, or whose name ends in a dot and it.

    Raises:
        ConfigError: a name fits no layer, or none is left.
    """
    names = tuple(linear)
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    problems = [
        Problem(f"model.lora.{key}", name, "fits no linear layer but the head", f"name some of: {kinds}")
        for key, wanted in (("target_modules", targets), ("exclude_modules", excluded))
        for name in wanted
        if name != ALL_LINEAR and not any(_fits(name, layer) for layer in names)
    ]
    chosen = tuple(
        layer
        for layer in names
        if any(target == ALL_LINEAR or _fits(target, layer) for target in targets)
        and not any(_fits(name, layer) for name in excluded)
    )
    if not chosen and not problems:
        problems = [Problem("model.lora.target_modules", targets, "leaves no layer", f"name some of: {kinds}")]
    if problems:
        raise ConfigError(problems)
    return chosen


def _fits(name: str, layer: str) -> bool:
    return layer == name or layer.endswith(f".{name}")
