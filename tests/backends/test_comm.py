import pytest
import torch
import torch.distributed as dist

from burnish.backends.comm import alone, joined
from burnish.errors import DataError, StorageError
from tests.ranks import on_ranks


def test_a_group_of_one_needs_no_port_and_ends():
    with joined("cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.device) == (0, 1, torch.device("cpu"))
        assert ranks.sum([1.5, 2]) == [1.5, 2.0]
    assert not dist.is_initialized()
    assert alone().gather({"a": 1}) == [{"a": 1}]


def agreements():
    with joined("cpu") as ranks:
        first = ranks.rank == 0
        return {
            "gathered": ranks.gather({"rank": ranks.rank, "text": "é" * ranks.rank}),
            "any": ranks.any([first, not first, False]),
            "agree": [ranks.agree("rows", flag=first), ranks.agree(f"rows {ranks.rank}", flag=False)],
            "first": ranks.of_first(lambda: f"made on {ranks.rank}"),
            "node": ranks.of_node(lambda: "one"),
            "sum": ranks.sum([ranks.rank, 0.5]),
        }


def test_all_ranks_agree():
    first, second = on_ranks(2, agreements)
    assert first == second
    assert first == {
        "gathered": [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}],
        "any": [True, True, False],
        "agree": [(True, True), (False, False)],
        "first": "made on 0",
        "node": "one",
        "sum": [1.0, 1.0],
    }


def fail_on_the_first():
    def fail():
        raise StorageError("place", "is full", fix="free some")

    with joined("cpu") as ranks:
        with pytest.raises(StorageError, match=r"place: is full\n  fix: free some"):
            ranks.of_first(fail)
        return ranks.is_first_to_fail()


def test_an_error_of_the_first_is_that_of_all():
    assert sorted(on_ranks(2, fail_on_the_first)) == [False, True]


def raises():
    raise DataError("x", "y")


def test_an_error_of_a_rank_reaches_the_test():
    with pytest.raises(DataError, match="x: y"):
        on_ranks(2, raises)
