"""Lengths become floating-point operations: what a step costs, and what a GPU can do."""

from collections.abc import Sequence

from burnish.models.load import ModelCard

PEAK_FLOPS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 150e12,
    "A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}
"""Dense bfloat16 operations a second by a part of the device's name, from the makers' data sheets."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a device; None when it is not in the table."""
    fitting = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def step_flops(card: ModelCard, *, lengths: Sequence[int], num_targets: int) -> float:
    """Operations of one forward and backward pass, recomputation not counted.

    A multiply-add is two operations and the backward pass costs two forwards, hence 6 for each weight and token
    (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B). Causal attention looks at half of the pairs.

    Args:
        card: of the model.
        lengths: tokens of each segment of the step, padding not counted.
        num_targets: positions at which the head is computed.
    """
    weights = 6 * card.num_matmul_parameters * sum(lengths)
    head = 6 * card.hidden_size * card.num_embeddings * num_targets
    pairs = sum(_pairs(length, window) for window in card.windows for length in lengths)
    return float(weights + head + 12 * card.num_heads * card.head_dim * pairs)


def _pairs(length: int, window: int | None) -> float:
    """Pairs of a token and one it sees, by area: half a square, less the triangle beyond the window."""
    beyond = max(0, length - window) if window else 0
    return (length**2 - beyond**2) / 2
