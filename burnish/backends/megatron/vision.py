"""Images in Megatron's model: the tower of ``transformers`` stands whole on every rank of the first stage.

Its rule: ranks that share matrices see the same images, and so have the same gradients of the tower; copies of the model
sum theirs like all others. Where a micro-batch has no image the tower is left out: its gradients stay the zeros of
Megatron's buffers, which every rank sums, so that none waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from burnish.backends.megatron.thd import StageInputs
from burnish.backends.optimizer import Recipe
from burnish.backends.tensors import image_arrays, in_space
from burnish.config.choices import ModelPart
from burnish.data.batch import MicroBatch
from burnish.models.attention import Segments
from burnish.models.rotary import rotary_axes, rotary_frequencies
from burnish.models.vision import VisionCard, part_of


class Rotary(nn.Module):
    """Angles of rotary positions in space (M-RoPE): one for each token of the rows, not for each place in a sequence.

    Megatron Core takes as many as there are tokens one by one, in packed rows too.
    """

    def __init__(self, config: Any, *, device: Any) -> None:
        super().__init__()
        self.frequencies, self.axes = rotary_frequencies(config).to(device), rotary_axes(config).to(device)

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """[tokens, 1, 1, head width] from [3, 1, tokens], positions along time, height and width."""
        angles = position_ids[self.axes, 0].t() * self.frequencies
        return torch.cat((angles, angles), -1)[:, None, None]


def language_config(hf_config: Any) -> Any:
    """The config of the model's words, which of one that takes no images is the whole."""
    text = hf_config.get_text_config()
    # What is tied stands in the config of the whole.
    text.tie_word_embeddings = hf_config.tie_word_embeddings
    return text


def add_tower(models: Sequence[Any], shell: Any, *, dtype: torch.dtype) -> VisionCard:
    """Give the first part of the model the tower of ``shell``, a model without weights; the tower has none yet either."""
    tower = shell.base_model.visual
    for model in models:
        if model.pre_process:
            with torch.device(torch.cuda.current_device()):
                model.visual = type(tower)._from_config(tower.config, dtype=dtype, attn_implementation="sdpa")
            model.deepstack = Deepstack(model.decoder.layers[: len(_deep_layers(tower.config))])
            for parameter in model.visual.parameters():
                # By this mark Megatron keeps copies on ranks that share matrices from drifting apart.
                parameter.average_gradients_across_tp_domain = True
    return VisionCard.of(shell.config, shell)


class Deepstack:
    """Features of images that are added to the outputs of the first layers, at the placeholders (Qwen3-VL)."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._left: list[Tensor] = []
        for layer in layers:
            layer.register_forward_hook(self._add)

    def set(self, features: Sequence[Tensor], is_image: Tensor, *, like: Tensor) -> None:
        """What the next forward adds: of each layer [placeholders, width], at the tokens ``is_image`` of ``like``."""
        self._left = [torch.zeros_like(like).masked_scatter(is_image, one.to(like.dtype)) for one in features]

    def _add(self, layer: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (output[0] + self._left.pop(0), *output[1:]) if self._left else output


def part_of_model(name: str) -> ModelPart:
    """The part of the model that Megatron's parameter ``name``, of a wrapped model or not, belongs to."""
    return part_of(f"model.{name.removeprefix('module.')}")


def freeze(models: Sequence[Any], recipe: Recipe) -> None:
    """Leave gradients to those parameters only that ``recipe`` trains."""
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of_model(name) not in recipe.frozen)


def with_images(
    inputs: StageInputs, micro_batch: MicroBatch, *, card: VisionCard, is_first: bool, device: torch.device
) -> StageInputs:
    """``inputs`` with positions in space, and on a first stage with the images of ``micro_batch``."""
    segments = Segments.of(micro_batch.segment_ids)
    positions = in_space(micro_batch, segments, card)[1:].reshape(3, 1, -1)
    missing = inputs.input_ids.shape[1] - positions.shape[2]
    positions = np.pad(positions, ((0, 0), (0, 0), (0, missing)))
    arrays = image_arrays(micro_batch) if is_first else {}
    images = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
    return replace(inputs, position_ids=torch.from_numpy(positions).to(device, non_blocking=True), images=images)


def embedded(model: Any, inputs: StageInputs, *, card: VisionCard) -> Mapping[str, Tensor]:
    """What ``model`` is given in place of the embeddings of its words: those with the images' features among them.

    Nothing where it has to embed only words, or none.
    """
    if not (model.pre_process and inputs.images):
        return {}
    pixels, grids = inputs.images["pixel_values"], inputs.images["image_grid_thw"]
    features = model.visual(pixels.to(model.visual.dtype), grid_thw=grids)
    words = model.embedding(input_ids=inputs.input_ids, position_ids=inputs.position_ids)
    is_image = (inputs.input_ids[0] == card.image_token_id)[:, None, None]
    model.deepstack.set(features.get("deepstack_features") or (), is_image, like=words)
    return {"decoder_input": words.masked_scatter(is_image, features.pooler_output.to(words.dtype))}


def _deep_layers(config: Any) -> Sequence[int]:
    return config.to_dict().get("deepstack_visual_indexes") or ()
