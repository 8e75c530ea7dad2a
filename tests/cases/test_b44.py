"""B44: fewer rows than a batch are one short step an epoch, with the loss of the rows there are."""

import json

import pytest

from burnish import SFTConfig, SFTTrainer
from burnish.assemble.run import build_run
from burnish.backends.comm import joined
from burnish.data.batch import IGNORE
from burnish.data.packing import Layout
from burnish.errors import ConfigError
from burnish.inspect.plan import check
from tests.parity import reference
from tests.ranks import on_ranks
from tests.toys import row, write_jsonl
from tests.train.fakes import make_store, make_stream

ROWS = [([4, 5, 6, 7], [0, 1, 1, 0]), ([8, 9], [0, 1]), ([10, 11, 12], [0, 0, 1])]


def keys_of(folder, model_dir, num_rows, **others):
    store = write_jsonl(folder / "store.jsonl", [row(ids, mask) for ids, mask in ROWS[:num_rows]])
    return {
        "model": {"path": str(model_dir)},
        "pretokenized_dataset_paths": [str(store)],
        "batch_size": 8,
        "num_epochs": 2,
        "max_length": 8,
        "log_dir": str(folder / "runs"),
        "cache_dir": str(folder / "cache"),
        "optimizer_config": {"lr": 1e-3, "eps": 1e-6},
        **others,
    }


def assert_two_steps_of_all(folder, model_dir, num_rows):
    lines = [json.loads(line) for line in (folder / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()]
    losses, _, _ = reference.train(model_dir, [ROWS[:num_rows]] * 2, lr=1e-3)
    assert [line["train/loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["train/epoch"] for line in lines] == [1, 2]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_run(tmp_path, model_dir, num_rows, packed):
    config = SFTConfig(**keys_of(tmp_path, model_dir, num_rows, use_sequence_packing=packed))
    report = check(config)
    assert (report.problems, report.plan.steps_per_epoch, report.plan.num_steps) == ((), 1, 2)
    assert SFTTrainer(config).train().step == 2
    assert_two_steps_of_all(tmp_path, model_dir, num_rows)


def as_a_rank(keys):
    with joined("cpu") as ranks, build_run(SFTConfig(**keys), ranks=ranks, interrupted=lambda: False) as trainer:
        return trainer.train().step


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_run_of_two_ranks(tmp_path, model_dir, num_rows):
    assert on_ranks(2, as_a_rank, keys_of(tmp_path, model_dir, num_rows)) == [2, 2]
    assert_two_steps_of_all(tmp_path, model_dir, num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_two_ranks_share_the_one_step(num_rows):
    store = make_store(num_rows)
    streams = [iter(make_stream(store, batch_size=8, layout=Layout(rank, 2))) for rank in range(2)]
    for _ in range(3):
        both = [next(stream) for stream in streams]
        assert sorted(both[0].row_numbers) == list(range(num_rows))
        assert len({len(batch.micro_batches) for batch in both}) == 1
        targets = [sum(int((m.labels != IGNORE).sum()) for m in batch.micro_batches) for batch in both]
        assert [sum(targets)] * 2 == [batch.num_targets for batch in both]
        assert min(targets) > 0 or num_rows == 1


def test_a_store_without_rows_is_an_error(tmp_path, model_dir):
    store = write_jsonl(tmp_path / "store.jsonl", [])
    problems = check(SFTConfig(model={"path": str(model_dir)}, pretokenized_dataset_paths=[str(store)])).problems
    assert "store.jsonl" in str(ConfigError(problems))
