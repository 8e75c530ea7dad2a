"""What ranks compare before they begin."""

import pytest

from burnish import SFTConfig
from burnish.backends.comm import joined
from burnish.errors import LaunchError
from burnish.launch.tasks import require_same
from tests.ranks import on_ranks


def compare(keys_by_rank):
    with joined() as ranks:
        require_same(SFTConfig(model={"path": "m"}, **keys_by_rank[ranks.rank]), ranks)


def test_ranks_with_other_configs_do_not_begin():
    with pytest.raises(LaunchError, match=r"rank 1 on .* has batch_size=8, and rank 0 on .* 4\n"):
        on_ranks(2, compare, [{"batch_size": 4}, {"batch_size": 8}])


def test_each_node_has_its_own_cache():
    on_ranks(2, compare, [{"cache_dir": "/scratch/1"}, {"cache_dir": "/scratch/2"}])
