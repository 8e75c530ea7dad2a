"""What is wrong with a run is known before it begins, all of it at once."""

import pytest

from burnish.config import SFTConfig
from burnish.inspect.plan import check
from tests.toys import chat, write_jsonl


@pytest.fixture
def config(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat("question", "answer")] * 5)
    return lambda **values: SFTConfig(
        **({"model": {"path": str(model_dir)}, "train_datasets": [str(rows)], "num_workers": 0} | values)
    )


def test_a_sampler_and_a_checkpoint_that_are_not_there(config, tmp_path):
    missing = str(tmp_path / "global_step_3")
    report = check(config(sampler="custom", sampler_class_path="no.Such", resume_from=missing))
    assert [(p.key, p.value) for p in report.problems] == [
        ("resume_from", missing),
        ("sampler_class_path", "no.Such"),
    ]


def test_a_callback_and_a_file_that_are_not_there(config):
    report = check(config(callbacks=["no.Such"], eval_datasets=["/no/rows.jsonl"]))
    assert [(p.key, p.value) for p in report.problems] == [("callbacks", "no.Such"), ("eval data", "/no/rows.jsonl")]
    assert "fix" not in report.problems[1].message


def test_a_model_that_is_not_there_is_one_problem_and_names_itself(config):
    (problem,) = check(config(model={"path": "/no/model"})).problems
    assert (problem.key, problem.value) == ("model.path", "/no/model")
    assert problem.message.startswith("no such folder")


def test_nothing_is_wrong(config):
    report = check(config(batch_size=2, num_epochs=3))
    assert report.problems == ()
    assert (report.plan.steps_per_epoch, report.plan.num_steps) == (3, 9)
