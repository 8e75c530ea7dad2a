"""A config becomes the frequencies of its rotary positions."""

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
