"""How a model is cut decides what a plan has to know. Imports no Megatron: it is asked before anything starts."""

from math import lcm

from burnish.backends.megatron.sizes import Sizes
from burnish.data.packing import Layout

FP8_TOKENS = 16
"""A rank's tokens are a multiple of it where matrices are multiplied in fp8."""


def layout_of(sizes: Sizes, *, rank: int, world_size: int, token_multiple: int = 1) -> Layout:
    """The layout of ``rank``: those that hold one copy of the model are given the same rows.

    Args:
        sizes: how the model is cut. Ranks are dealt in Megatron's order: those that share matrices lie next to each
            other, then those that share rows, then the copies, then the stages.
        rank: of ``world_size``.
        world_size: all ranks.
        token_multiple: what the tokens that a rank computes at a time have to be a multiple of (fp8).
    """
    near = sizes.tensor * sizes.context
    copies = world_size // sizes.devices_per_replica
    # Each rank holds two chunks of a segment; between matrices, ranks share what it holds of a row.
    segment = 2 * sizes.context if sizes.context > 1 else 1
    row = near * token_multiple if sizes.sequence_parallel else sizes.context * token_multiple
    return Layout(
        data_rank=rank // near % copies,
        data_size=copies,
        segment_multiple=segment,
        row_multiple=lcm(segment, row),
        micro_batch_multiple=1 if sizes.virtual_pipeline is None else sizes.pipeline,
    )
