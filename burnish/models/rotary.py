"""A config becomes the frequencies of its rotary positions, and the axes of those in space."""

from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(config: Any) -> Tensor:
    """[head width / 2] float32: radians a position, for a ``config`` of ``transformers`` whose frequencies are fixed."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        facts = config.to_dict()
        width = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
        wavelengths: Tensor = rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        return 1.0 / wavelengths
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return frequencies


def rotary_axes(config: Any) -> Tensor:
    """[head width / 2] int64: which position turns each pair of a head (0 is time, 1 height, 2 width), for M-RoPE.

    Args:
        config: of ``transformers``, of a language model whose ``rope_parameters`` have an ``mrope_section``.
    """
    rope = config.rope_parameters
    sections: list[int] = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
