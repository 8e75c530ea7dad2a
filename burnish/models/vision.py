"""Images among tokens: what a vision-language model has beside its language model, and where its tokens stand.

Its rule: a row among others is a row alone. Positions begin anew in each segment, and no micro-batch goes without the tower.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from burnish.config.choices import ModelPart

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The ``model_type`` of the vision-language models that can be trained."""
_TOWER = "model.visual."
_PROJECTORS = (f"{_TOWER}merger.", f"{_TOWER}deepstack_merger_list.")


@dataclass(frozen=True, slots=True)
class VisionCard:
    """What a run needs to know of the tower before its weights are read."""

    image_token_id: int
    """Placeholder token, one for each square of ``merge_size`` patches along each side."""
    merge_size: int
    patch_size: int
    """Pixels along each side of a patch."""
    num_features: int
    """Numbers of one patch."""
    num_heads: int
    head_dim: int
    num_layers: int
    num_full_layers: int
    """Layers in which a patch sees its whole image; in the others, a window."""
    window_patches: int
    """Patches of a window."""
    num_patch_parameters: int
    """Parameters that each patch is multiplied with."""
    num_merged_parameters: int
    """Those that each placeholder's patches together are multiplied with."""

    @classmethod
    def of(cls, config: Any, shell: Any) -> "VisionCard":
        """Read from the config of a model of :data:`FAMILIES` and the model without weights."""
        facts = config.vision_config.to_dict()
        width = int(facts.get("embed_dim") or facts["hidden_size"])
        heads, layers = int(facts["num_heads"]), int(facts["depth"])
        sizes = {name: p.numel() for name, p in shell.named_parameters() if name.startswith(_TOWER) and p.ndim >= 2}
        merged = sum(size for name, size in sizes.items() if part_of(name) == "projector")
        # Learned positions are looked up, not multiplied.
        looked_up = sum(size for name, size in sizes.items() if name.endswith("pos_embed.weight"))
        window = int(facts.get("window_size", 0)) // int(facts["patch_size"])
        full = facts.get("fullatt_block_indexes")
        return cls(
            image_token_id=int(config.image_token_id),
            merge_size=int(facts["spatial_merge_size"]),
            patch_size=int(facts["patch_size"]),
            num_features=int(facts.get("in_channels", facts.get("in_chans", 3)))
            * int(facts["temporal_patch_size"])
            * int(facts["patch_size"]) ** 2,
            num_heads=heads,
            head_dim=width // heads,
            num_layers=layers,
            num_full_layers=layers if full is None else len(full),
            window_patches=window**2,
            num_patch_parameters=sum(sizes.values()) - merged - looked_up,
            num_merged_parameters=merged,
        )


def part_of(name: str) -> ModelPart:
    """The part of a vision-language model that the parameter ``name`` belongs to."""
    if name.startswith(_PROJECTORS):
        return "projector"
    return "vision" if name.startswith(_TOWER) else "language"


def positions_in_space(
    input_ids: NDArray[np.int64],
    segments: tuple[tuple[tuple[int, int], ...], ...],
    grids: NDArray[np.integer],
    *,
    card: VisionCard,
) -> NDArray[np.int64]:
    """[4, rows, length]: the position in the segment, and those along time, height and width (M-RoPE).

    A text token stands one after the last in all three. The tokens of an image stand in its grid, which begins where the
    next text token would stand; the text goes on after the longer side of it (Wang et al. 2024, section 2.1).

    Args:
        input_ids: [rows, length]
        segments: of each row, (start, stop) of its segments.
        grids: [images, 3] patches along time, height and width, in the order of their placeholders.
        card: of the model.
    """
    positions = np.zeros((4, *input_ids.shape), np.int64)
    left = iter(grids.tolist())
    for row, spans in enumerate(segments):
        for start, stop in spans:
            positions[0, row, start:stop] = np.arange(stop - start)
            _place(positions[1:, row, start:stop], input_ids[row, start:stop] == card.image_token_id, left, card)
    return positions


def _place(positions: NDArray[np.int64], is_image: NDArray[np.bool_], grids: Any, card: VisionCard) -> None:
    """Fill [3, length] of one segment."""
    begin, following = 0, 0
    while begin < len(is_image):
        if not is_image[begin]:
            found = int(np.argmax(is_image[begin:]))
            end = begin + found if found else len(is_image)
            positions[:, begin:end] = following + np.arange(end - begin)
            following += end - begin
        else:
            time, height, width = next(grids)
            shape = (time, height // card.merge_size, width // card.merge_size)
            end = begin + int(np.prod(shape))
            positions[:, begin:end] = following + np.indices(shape).reshape(3, -1)
            following += max(shape[1:])
        begin = end


def no_image(card: VisionCard, *, device: torch.device) -> dict[str, Tensor]:
    """The arguments of a tower for the smallest image there is, a black one."""
    side = card.merge_size
    return {
        "pixel_values": torch.zeros(side * side, card.num_features, device=device),
        "image_grid_thw": torch.tensor([[1, side, side]], device=device),
    }


def nothing_of(features: Any) -> Tensor:
    """0, which depends on all that a tower gave: its parameters get gradients of zero, and take part in every sum.

    Ranks whose micro-batch has no image would wait for the others, or be waited for.
    """
    given = [features.pooler_output, *(features.get("deepstack_features") or ())]
    tensors = [t for one in given for t in (one if isinstance(one, list | tuple) else [one])]
    return sum((t.float().sum() for t in tensors), torch.zeros((), device=tensors[0].device)) * 0.0


def image_flops(patches: NDArray[np.integer], *, card: VisionCard) -> NDArray[np.float64]:
    """Operations of a forward and backward pass of the tower for rows of so many patches, as if of one image each.

    As for tokens (:func:`burnish.models.flops.segment_flops`); here a patch sees all of its image, or of its window.
    """
    count = patches.astype(np.float64)
    windowed = card.num_layers - card.num_full_layers
    pairs = card.num_full_layers * count**2 + windowed * count * np.minimum(count, card.window_patches)
    weights = card.num_patch_parameters + card.num_merged_parameters / card.merge_size**2
    return 6 * weights * count + 12 * card.num_heads * card.head_dim * pairs
