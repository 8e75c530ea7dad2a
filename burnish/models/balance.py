"""The loss that keeps the experts of a mixture equally busy, as ``transformers`` has it beside each such model."""

import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor

_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = {"gate_logits", "num_experts", "top_k", "attention_mask"}


def balancing_loss(model: Any) -> Callable[[tuple[Tensor, ...], Tensor], Tensor] | None:
    """(logits of each layer's router [tokens, experts], which tokens count [rows, length]) -> the loss, a scalar.

    With f(e) the share of the tokens that go to expert e, and p(e) the mean probability that its routers give it, both over
    all layers, it is the number of experts times the sum of f(e) p(e): as many as a token goes to where all are equally
    busy (Fedus et al. 2021, equations 4 to 6).

    Args:
        model: of ``transformers``, a causal language model.

    Returns:
        None where the model is no mixture, or one without such a loss.
    """
    function = vars(sys.modules[type(model).__module__]).get(_FUNCTION)
    experts, per_token = (vars(model).get(name) for name in ("num_experts", "num_experts_per_tok"))
    if function is None or not experts or not per_token or set(signature(function).parameters) != _ARGUMENTS:
        return None
    return partial(_call, function, experts, per_token)


def _call(function: Any, experts: int, per_token: int, logits: tuple[Tensor, ...], is_token: Tensor) -> Tensor:
    loss: Tensor = function(tuple(layer.float() for layer in logits), experts, per_token, is_token)
    return loss
