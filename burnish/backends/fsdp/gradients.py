"""The gradients of all ranks are measured and scaled as one. Its rule: each rank looks at what it holds, and once."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6
"""Added to the norm before dividing by it, as in ``torch.nn.utils.clip_grad_norm_``."""


def held_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Those that exist, as far as this rank holds them; to scale them is to scale those of the parameters."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def sum_of_squares(gradients: list[Tensor]) -> float:
    """That of all their elements."""
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2


def clip(gradients: list[Tensor], *, norm: float, max_norm: float | None) -> None:
    """Scale them, in place, so that what had the ``norm`` has at most ``max_norm``; None or 0 leaves them."""
    if max_norm and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + _EPSILON))
