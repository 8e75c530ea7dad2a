import torch
import torch.distributed as dist

from burnish.backends.comm import join, leave, sum_over_ranks


def test_a_group_of_one_needs_no_port_and_ends():
    ranks = join("cpu")
    assert (ranks.rank, ranks.world_size, ranks.device) == (0, 1, torch.device("cpu"))
    assert sum_over_ranks([1.5, 2], ranks=ranks) == [1.5, 2.0]
    inner = join("cpu")
    leave(inner)
    assert dist.is_initialized()
    leave(ranks)
    leave(ranks)
    assert not dist.is_initialized()
