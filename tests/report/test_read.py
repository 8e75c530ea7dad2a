"""What a run's folder holds is read whole, and what is torn, secret or not there is left out."""

import json

import numpy as np
import pytest

from burnish.errors import DataError
from burnish.report.read import read_runs
from tests.report.folders import metrics_line, run_folder


def one(folder):
    (run,) = read_runs([folder])
    return run


def points(curve):
    return list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def test_of_a_repeated_step_the_last_line_counts_whole(tmp_path):
    lines = [
        metrics_line(0, eval_a="x"),
        metrics_line(1, train_loss=4.0, timing_eval=9.0),
        metrics_line(2, train_loss=3),
        metrics_line(3, train_loss=2.5, eval_n=7.0),
        metrics_line(2, train_loss=2.0, train_lr=0.5),  # resumed from step 1
        metrics_line(3, train_loss=None),
        metrics_line(4, train_loss=1.0),
    ]
    run = one(run_folder(tmp_path / "a", lines))
    loss = run.curves["train/loss"]
    assert loss.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(loss.values, [4.0, 2.0, np.nan, 1.0])
    assert points(run.curves["train/lr"]) == [(2, 0.5)]
    assert points(run.curves["timing/eval"]) == [(1, 9.0)]
    assert "eval/a" not in run.curves, "a text is no metric"
    assert "eval/n" not in run.curves, "the step's last line knows nothing of it"
    assert run.torn_lines == 0


def test_torn_lines_and_older_files(tmp_path):
    good = [metrics_line(step, train_loss=float(step)) for step in (1, 2)]
    folder = run_folder(tmp_path / "a", [good[0], '{"step": 9, "train/lo', '{"step": true, "x": 1}', "[1]", good[1]])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "train/name": "\xc3')
    (folder / "metrics.1.jsonl").write_text(metrics_line(7, train_loss=7.0) + "\n")
    run = one(folder)
    assert points(run.curves["train/loss"]) == [(1, 1.0), (2, 2.0)]
    assert run.torn_lines == 3, "the last line is still being written"


def test_numbers_that_json_lacks_are_not_known(tmp_path):
    run = one(run_folder(tmp_path / "a", ['{"step": 1, "x": NaN}', '{"step": 2, "x": 1e999}', '{"step": 3, "x": 2}']))
    np.testing.assert_array_equal(run.curves["x"].values, [np.nan, np.nan, 2.0])


def test_a_config_without_its_secrets(tmp_path):
    config = (
        'model.path: "s3://key:word@b/m"\n'
        'callbacks: [{"notify.Hook": {"token": "t1", "to": "me"}}]\n'
        'chat_template_kwargs: {"api_key": "t2", "deep": {"PASSWORD": "t3"}}\n'
        'train_datasets: ["https://b/x?X-Amz-Signature=t4&part=1"]\n'
        "batch_tokens: 512\n\n"
        "# defaults\n"
        "# sampler_kwargs: {}\n"
        "my_token: t5 by hand\n"
    )
    run = one(run_folder(tmp_path / "a", config=config))
    assert run.given == {
        "model.path": '"s3://***@b/m"',
        "callbacks": '[{"notify.Hook": {"token": "***", "to": "me"}}]',
        "chat_template_kwargs": '{"api_key": "***", "deep": {"PASSWORD": "***"}}',
        "train_datasets": '["https://b/x?X-Amz-Signature=***&part=1"]',
        "batch_tokens": "512",
        "my_token": "***",
    }
    assert run.defaults == {"sampler_kwargs": "{}"}


def test_answers_in_the_order_of_steps(tmp_path):
    answers = [{"step": s, "prompt": p, "answer": a} for s, p, a in [(4, "q", "b"), (2, "q", "a"), (4, "q", "c")]]
    folder = run_folder(tmp_path / "a", answers=answers)
    with (folder / "answers.jsonl").open("a") as file:
        file.write('{"step": 5, "prompt": "q", "ans')
    assert [(a.step, a.answer) for a in one(folder).answers] == [(2, "a"), (4, "c")]


def test_files_that_are_missing_or_damaged_leave_the_curves(tmp_path):
    folder = run_folder(tmp_path / "a")
    (folder / "config.yaml").unlink()
    uri = "https://elsewhere/pixel.png"
    sample = {"source": "s", "row": 0, "tokens": 1, "targets": 1, "spans": [], "images": [uri]}
    for damaged in ("", "{", "[]", json.dumps({"sources": [], "samples": [sample]})):
        (folder / "data.json").write_text(damaged)
        run = one(folder)
        assert (run.facts.sources, run.facts.samples, run.given, run.answers) == ([], [], {}, ())
        assert len(run.curves["train/loss"].steps) == 3


def test_names_tell_runs_apart_and_a_run_counts_once(tmp_path):
    folders = [run_folder(tmp_path / name) for name in ("x/sft", "y/sft", "y/other")]
    runs = read_runs([*folders, tmp_path / "y" / ".." / "x" / "sft"])
    assert [run.name for run in runs] == ["x/sft", "y/sft", "other"]


def test_a_wrong_folder_is_named_with_what_to_do(tmp_path):
    good = run_folder(tmp_path / "runs" / "sft")
    (tmp_path / "empty").mkdir()
    wrong = {
        tmp_path / "none": "there is no such folder",
        tmp_path / "empty": "holds no metrics.jsonl",
        tmp_path / "runs": f"name runs in it: {good}",
        good / "metrics.jsonl": f"name its folder, {good}",
        run_folder(tmp_path / "begun", []): "holds no step yet",
    }
    for folder, said in wrong.items():
        with pytest.raises(DataError, match=str(folder)) as error:
            read_runs([good, folder])
        assert said in str(error.value)
