"""Lengths become floating-point operations: what a step costs, and what a GPU can do and hold."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from burnish.errors import ConfigError, Problem
from burnish.models.load import ModelCard
from burnish.models.vision import image_flops

PEAK_FLOPS = {
    # NVIDIA DGX B200 and GB200 NVL72 data sheets; one GPU, half of the figure with sparsity.
    "B200": 2250e12,
    "GB200": 2500e12,
    # NVIDIA H100 and H200 Tensor Core GPU data sheets, half of the figure with sparsity; the H800 differs in links.
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    # NVIDIA A100 data sheet; the A800 differs in links.
    "A100": 312e12,
    "A800": 312e12,
    # NVIDIA L40S, L40, L4, A10, A40 and RTX A6000 data sheets, without sparsity; the A10G as Amazon's page of G5 has it.
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 150e12,
    "A6000": 155e12,
    # NVIDIA Ada and Ampere GA102 architecture papers, with sums in float32.
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    # AMD Instinct MI300X and MI250X data sheets, without sparsity.
    "MI300X": 1307e12,
    "MI250X": 383e12,
}
"""Dense bfloat16 operations a second by a part of the device's name, from the makers."""
MEMORY_GIB = {
    **{"B200": 180, "GB200": 186, "H200": 141, "H100 PCIe": 80, "H100 NVL": 94, "H100": 80, "H800": 80},
    **{"A100": 80, "A800": 80, "L40S": 48, "L40": 48, "L4": 24, "A10G": 24, "A10": 24, "A40": 48, "A6000": 48},
    # Of the MI250X's two dies each is a device.
    **{"RTX 4090": 24, "RTX 3090": 24, "MI300X": 192, "MI250X": 64},
}
"""Memory as the same data sheets have it, the largest where there are several; the drivers show up to a tenth less."""
_NAMED = re.compile(r"(.+?)(?:-(\d+)gb?)?")


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on."""

    name: str
    memory_gib: float
    peak_flops: float | None
    """Dense bfloat16 operations a second; None when that is not known."""

    @classmethod
    def named(cls, name: str) -> "Device":
        """The device that ``name`` means, such as ``h200``, ``a100-40g`` or ``rtx-4090``.

        Raises:
            ConfigError: it is not in the tables.
        """
        known = {key.lower().replace(" ", "-"): key for key in PEAK_FLOPS}
        model, memory = match.groups() if (match := _NAMED.fullmatch(name.lower())) else (name, None)
        if model not in known:
            fix = f"write one of {', '.join(known)}, with its memory where there are several, as in a100-40g"
            raise ConfigError([Problem("device", name, "is no device that is known", fix)])
        key = known[model]
        return cls(name, float(memory or MEMORY_GIB[key]), PEAK_FLOPS[key])


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a device; None when it is not in the table."""
    fitting = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def step_flops(
    card: ModelCard,
    *,
    lengths: Sequence[int] | NDArray[np.integer],
    num_targets: int,
    patches: Sequence[int] | NDArray[np.integer] = (),
    frozen: bool = False,
    tower_frozen: bool = False,
) -> float:
    """Operations of one forward and backward pass, recomputation not counted.

    Args:
        card: of the model.
        lengths: tokens of each segment of the step, padding not counted.
        num_targets: positions at which the head is computed.
        patches: of each image.
        frozen: whether its weights get no gradients, which saves a third of what they cost; adapters are not counted.
        tower_frozen: whether the tower goes forward only.
    """
    weights = card.num_matmul_parameters * float(np.sum(lengths)) + card.hidden_size * card.num_embeddings * num_targets
    saved = 2 * weights if frozen else 0
    head = 6 * card.hidden_size * card.num_embeddings * num_targets
    images = image_flops(np.asarray(patches, np.int64), card=card.vision).sum() if card.vision else 0.0
    return float(
        segment_flops(np.asarray(lengths), card=card).sum() + head - saved + images / (3 if tower_frozen else 1)
    )


def segment_flops(lengths: NDArray[np.integer], *, card: ModelCard) -> NDArray[np.float64]:
    """The same of each segment, without the head.

    A multiply-add is two operations and the backward pass costs two forwards, hence 6 for each weight and token
    (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B), and of attention only pairs that are seen.
    """
    tokens = lengths.astype(np.float64)
    pairs = sum(layers * _pairs(tokens, window) for window, layers in Counter(card.windows).items())
    return 6 * card.num_matmul_parameters * tokens + 12 * card.num_heads * card.head_dim * pairs


def _pairs(lengths: NDArray[np.float64], window: int | None) -> NDArray[np.float64]:
    """Pairs of a token and one it sees, itself included: a triangle, less that of the tokens beyond the window."""
    beyond = np.maximum(0, lengths - window) if window else np.zeros_like(lengths)
    pairs: NDArray[np.float64] = (lengths * (lengths + 1) - beyond * (beyond + 1)) / 2
    return pairs
