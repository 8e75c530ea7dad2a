"""B50: another number of ranks goes on with the same rows; other data, batches, weights or seeds are named and refused."""

import shutil

import pytest

from burnish.assemble.run import build_run
from burnish.backends.comm import joined
from burnish.errors import CheckpointError
from tests.parity.runs import ROWS, config_of, run_on, train_as_rank
from tests.ranks import on_ranks
from tests.toys import row, write_jsonl

NUM_STEPS = 6


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two that a run draws from, and one more."""
    folder = tmp_path_factory.mktemp("stores")
    parts = (ROWS[:7], ROWS[7:], ROWS[:3])
    return [
        str(write_jsonl(folder / f"{number}.jsonl", [row(ids, mask) for ids, mask in part]))
        for number, part in enumerate(parts)
    ]


@pytest.fixture(scope="module")
def keys(stores):
    return {"pretokenized_dataset_paths": stores[:2], "train_dataset_weights": [1.0, 2.0], "sampler": "random"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_dir, keys):
    return run_on(1, tmp_path_factory.mktemp("whole"), model_dir=model_dir, num_steps=NUM_STEPS, **keys)


@pytest.fixture(scope="module")
def halted(tmp_path_factory, model_dir, keys):
    """Two ranks have taken three steps."""
    folder = tmp_path_factory.mktemp("halted")
    stop = {"callbacks": [{"tests.parity.test_resume.StopAt": {"step": 3}}]}
    on_ranks(2, train_as_rank, folder, model_dir, NUM_STEPS, keys | stop)
    return folder


@pytest.fixture
def folder(tmp_path, halted):
    return shutil.copytree(halted, tmp_path / "run")


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_ranks_draw_the_same_rows(folder, model_dir, keys, whole, ranks):
    got = run_on(ranks, folder, model_dir=model_dir, num_steps=NUM_STEPS, resume_from="latest", **keys)
    assert got["rows"] == whole["rows"][3:]
    assert got["losses"] == pytest.approx(whole["losses"], rel=1e-6)


def resume(folder, model_dir, keys):
    config = config_of(folder, model_dir=model_dir, num_steps=NUM_STEPS, resume_from="latest", **keys)
    with joined("cpu") as ranks, build_run(config, ranks=ranks, interrupted=lambda: False) as trainer:
        return trainer.train().step


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 8}, "batch_size was 4, is 8"),
        ({"seed": 7}, "seed was 42, is 7"),
        ({"train_dataset_weights": [2.0, 1.0]}, r"train_dataset_weights was \[1.0, 2.0\], is \[2.0, 1.0\]"),
        ({"max_length": 70}, "max_length was 128, is 70"),
    ],
    ids=str,
)
def test_what_moves_the_place_in_the_data_is_named(folder, model_dir, keys, changes, named):
    with pytest.raises(CheckpointError, match=named):
        resume(folder, model_dir, keys | changes)
    assert resume(folder, model_dir, keys | changes | {"resume_allow_changes": True}) == NUM_STEPS


def test_a_store_that_was_added_is_named(folder, model_dir, keys, stores):
    added = {"pretokenized_dataset_paths": stores, "train_dataset_weights": None}
    with pytest.raises(CheckpointError, match="data 2 was None, is"):
        resume(folder, model_dir, keys | added)
