"""Megatron Core on a machine without a GPU, over gloo: a stand-in for ``torch.cuda``, to test with.

Megatron's own arithmetic, schedules and collectives run unchanged; what it asks of a GPU beside them is answered here,
and no file of it is touched. Two things are replaced:

* arguments that say ``cuda``. A mode of torch sees every call and reads them as ``cpu``; ``tensor.cuda()`` is the tensor
  itself, and a float32 tensor says that it is a ``torch.cuda.FloatTensor``, which is how Megatron's optimizers tell their
  parameters from others. Pinned memory, of which there is none, is not asked for.
* functions of ``torch.cuda``. There is one device; streams and events do nothing, for nothing runs beside the caller;
  its random numbers are those of the CPU; it holds no memory. With them goes one function of Megatron, which brings the
  counts of tokens for experts back from the GPU.

What it cannot show: Transformer Engine, NCCL, overlap, fused kernels, fp8, speed.
Its rule: never where there is a GPU, and never in a process that does anything else, for nothing of this is undone.
"""

import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from burnish.errors import LaunchError
from burnish.log import get_logger

log = get_logger(__name__)

_CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


class _CudaIsCpu(TorchFunctionMode):
    """Reads ``cuda`` as ``cpu`` in the arguments of every function of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(args[0]).replace("torch.", "torch.cuda.")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if function is torch.Tensor.to and any(map(_is_cuda, args[1:2])):
            args = (args[0], _CPU, *args[2:])
        return function(*args, **kwargs)


class _Queue:
    """A stream or an event of a device on which everything is done when it is asked for."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Queue":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None:
        pass

    record = wait_event = wait_stream = synchronize = wait

    def record_event(self, event: Any = None) -> Any:
        return event or self


def install() -> None:
    """Let Megatron Core run on the CPU from here on, in this process. Called before Megatron is imported elsewhere.

    Raises:
        LaunchError: there is a GPU.
    """
    if torch.cuda.is_available():
        raise LaunchError("megatron_config.cpu", "there is a GPU on this machine", fix="leave megatron_config.cpu out")
    if _installed:
        return
    from megatron.core.tensor_parallel import random  # binds what is replaced below, as it is
    from megatron.core.transformer.moe import token_dispatcher
    from torch import _dynamo

    # Not a warning: each rank would give it.
    log.info("megatron_config.cpu: Megatron Core runs on a stand-in for a GPU: to test with, not to train with")
    _dynamo.config.disable = True  # compiled fusions cost minutes here and gain nothing
    for name, function in _replacements().items():
        setattr(torch.cuda, name, function)
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _nothing(), _nothing()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    # It warns that the CPU's random state changes within the GPU's: here they are one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    mode = _CudaIsCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _installed.append(mode)


def _replacements() -> dict[str, Any]:
    queue = _Queue()
    return {
        "Stream": _Queue,
        "Event": _Queue,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: queue,
        "default_stream": lambda *_: queue,
        "current_device": lambda: _CPU,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        **{name: _nothing() for name in ("set_device", "synchronize", "empty_cache")},
    }


def _nothing() -> Any:
    """A function that does nothing; each its own, for torch tells functions apart by identity."""
    return lambda *_, **__: None


def _on_host(value: Any, *, as_numpy: bool = False, **_: Any) -> Any:
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False
