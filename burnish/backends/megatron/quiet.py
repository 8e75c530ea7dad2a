"""Warnings that a user can do nothing about are kept out of the log, and no others."""

import warnings

NOISE = (
    # Megatron's parts of its own and PyTorch's take their place, as docs/megatron.md says.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Its default for CUDA graphs, which are not used.
    "full scope is deprecated",
    # Megatron calls them; they are renamed in newer PyTorch.
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    # Speed on a GPU, where the variable is set: without one, nothing runs beside anything.
    "When using (sequence parallelism|async grad allreduce) it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""What their texts begin with."""


def keep_quiet() -> None:
    """From here on, in this process; called before Megatron is imported, which warns then already."""
    for text in NOISE:
        warnings.filterwarnings("ignore", message=text)
