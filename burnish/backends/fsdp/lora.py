"""A model gets low-rank adapters beside its frozen layers (peft); trained, they are merged, or saved as peft has them.

Its rule: the model keeps its class and the names of its modules, so that nothing else has to know of adapters.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from burnish.errors import ConfigError, Problem
from burnish.models.layers import ALL_LINEAR, adapted_layers, linear_layers

_NAME = "default"
"""What peft calls the one adapter of a model."""
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Which layers get adapters, and of what shape (Hu et al. 2021)."""

    rank: int
    alpha: float = 16
    """What an adapter adds is scaled by ``alpha / rank``."""
    dropout: float = 0.0
    """Of what goes into an adapter."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names as :func:`burnish.models.layers.adapted_layers` takes them."""
    exclude_modules: tuple[str, ...] = ()

    def layers(self, linear: Collection[str]) -> tuple[str, ...]:
        """Those of the layers ``linear`` that get one.

        Raises:
            ConfigError: a name fits no layer, or none is left.
        """
        return adapted_layers(linear, targets=self.target_modules, excluded=self.exclude_modules)


def lora_problems(settings: LoraSettings, linear: Collection[str]) -> list[Problem]:
    """Why a model with the layers ``linear`` cannot get these adapters."""
    if find_spec("peft") is None:
        fix = "pip install 'burnish[lora]'"
        return [Problem("model.lora.rank", settings.rank, "needs peft, which is not installed", fix)]
    try:
        settings.layers(linear)
    except ConfigError as error:
        return list(error.problems)
    return []


class Adapters:
    """The adapters of a model on meta, put into it when this is made; its own parameters are frozen.

    Those of adapters are float32, whatever the dtype of the model.

    Raises:
        ConfigError: peft is not installed, a name of ``settings`` fits no layer, or peft would adapt something else.
    """

    def __init__(self, model: Any, settings: LoraSettings, *, path: str) -> None:
        linear = linear_layers(model)
        if problems := lora_problems(settings, linear):
            raise ConfigError(problems)
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        chosen = settings.layers(linear)
        kinds = {name.rpartition(".")[2] for name in chosen}
        alike = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in kinds}
        settled: Any = LoraConfig
        self._config = settled(
            task_type="CAUSAL_LM",
            base_model_name_or_path=path,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=sorted(kinds if alike == set(chosen) else chosen),
            # GPT-2's layers hold their weights the other way round.
            fan_in_fan_out=not any(isinstance(linear[name], nn.Linear) for name in chosen),
        )
        inject_adapter_in_model(self._config, model, _NAME, low_cpu_mem_usage=True)
        self._layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        _require_same(chosen, found=self._layers)
        for layer in self._layers.values():
            layer.lora_A.float()
            layer.lora_B.float()

    @contextmanager
    def aside(self, model: Any, *, seed: int, device: torch.device) -> Iterator[None]:
        """Meanwhile ``model`` is the plain one, to be read; afterwards it is frozen again, and adapters have values.

        Called once they are spread. Inward they are uniform as in peft, from ``seed`` alone, and each rank gets its part
        of the same numbers; outward zero.
        """
        for name, layer in self._layers.items():
            model.set_submodule(name, layer.base_layer)
        yield
        model.requires_grad_(False)
        for number, (name, layer) in enumerate(self._layers.items()):
            model.set_submodule(name, layer)
            entropy = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]
            inward, outward = (part[_NAME] for part in (layer.lora_A, layer.lora_B))
            values = torch.empty(inward.weight.shape)
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=torch.Generator().manual_seed(int(entropy)))
            inward.weight = _spread(values.to(device), like=inward.weight)
            outward.weight = _spread(torch.zeros(outward.weight.shape, device=device), like=outward.weight)

    def merged(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights of the plain model, by name: what the adapters add is added in float32.

        Args:
            weights: whole, by parameter name.
        """
        for name, tensor in weights.items():
            layer, _, own = name.partition(_BASE)
            if own == "weight":
                inward, outward = (weights[f"{layer}.{part}.{_NAME}.weight"] for part in ("lora_A", "lora_B"))
                added = self._layers[layer].scaling[_NAME] * (outward.float() @ inward.float())
                added = added.T if self._layers[layer].fan_in_fan_out else added
                yield f"{layer}.weight", (tensor.float() + added).to(tensor.dtype)
            elif own or not _is_adapter(name):
                yield plain_name(name), tensor

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write peft's own folder.

        Args:
            folder: made if it is missing.
            weights: whole, by parameter name; those of adapters are written, as they are.
        """
        from safetensors.torch import save_file

        self._config.inference_mode = True
        # A set, whose order differs between processes.
        self._config.target_modules = sorted(self._config.target_modules or ())
        self._config.save_pretrained(str(folder))
        tensors = {
            f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.contiguous()
            for name, tensor in weights.items()
            if _is_adapter(name)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def plain_name(name: str) -> str:
    """The name that a parameter of the frozen base has in the plain model."""
    return name.replace(_BASE, ".")


def _is_adapter(name: str) -> bool:
    return name.endswith((f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"))


def _require_same(chosen: tuple[str, ...], *, found: Mapping[str, Any]) -> None:
    """Peft reads some names of mixtures of experts as those of the experts' parameters."""
    if wrong := sorted(set(chosen) ^ found.keys()):
        message = f"peft adapts something else for {wrong[0]} and {len(wrong) - 1} more of this model"
        fix = "name the layers of attention alone: [q_proj, k_proj, v_proj, o_proj]"
        raise ConfigError([Problem("model.lora.target_modules", sorted(chosen), message, fix)])


def _spread(values: Tensor, *, like: nn.Parameter) -> nn.Parameter:
    """``values``, or this rank's part of them."""
    if isinstance(like, DTensor):
        values = distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)
    return nn.Parameter(values)
