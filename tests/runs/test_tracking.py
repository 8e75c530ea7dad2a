"""All trackers at once through the command itself: a run that failed and was resumed is one run in each of them."""

import json
import time

import pytest

from tests.runs.commands import burnish, metrics
from tests.toys import chat, write_jsonl
from tests.train.kept import of_mlflow, of_tensorboard, of_trackio, of_wandb

SECRET = "hunter2"


@pytest.mark.usefixtures("services_here")
def test_each_tracker_holds_one_run_after_a_failure_and_a_resume(tmp_path, model_dir, mlflow_server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    project, folder = f"project of {tmp_path.name}", tmp_path / "runs" / "sft"
    chats, held = (
        write_jsonl(tmp_path / f"{name}.jsonl", [chat(f"question {i}", f"{name} {i}") for i in range(8)])
        for name in ("chats", "held")
    )
    words = [f"model.path={model_dir}", f"train_datasets={chats}", f"eval_datasets={held}", "num_workers=0"]
    words += [
        "num_steps=5",
        "eval_interval=2",
        "eval_generate.prompts=[who are you?]",
        "eval_generate.max_new_tokens=2",
    ]
    words += ["ckpt_path=ckpt", "ckpt_interval=1", f"project_name={project}"]
    words += [
        "logger=[console,tensorboard,wandb,mlflow,trackio]",
        "tags=[a,b]",
        f"chat_template_kwargs={{url: 's3://user:{SECRET}@bucket'}}",
    ]

    failed = burnish("train", *words, "callbacks=[{tests.runs.failing.Failing: {how: user, rank: 0}}]", folder=tmp_path)
    assert failed.returncode == 2, failed.stderr
    assert "is planted" in failed.stderr
    assert of_mlflow(mlflow_server, project=project)["status"] == "FAILED"
    resumed = burnish("train", *words, "resume_from=ckpt/global_step_1", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "left alone" not in failed.stderr + resumed.stderr

    steps = metrics(tmp_path)
    losses = [(step, pytest.approx(steps[step]["train/loss"])) for step in (1, 2, 3, 4, 5)]
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    answers = {line["step"]: [{"prompt": line["prompt"], "answer": line["answer"]}] for line in lines}
    assert list(answers) == [2, 4, 5]
    kept = {
        "tensorboard": of_tensorboard(folder),
        "wandb": of_wandb(folder),
        "mlflow": of_mlflow(mlflow_server, project=project),
        "trackio": of_trackio(project),
    }
    for name, run in kept.items():
        assert run["losses"] == losses, name
        assert "eval/held.jsonl/loss" in run["metrics"], name
        assert SECRET not in str(run), name
    assert (len(set(kept["wandb"]["ids"])), kept["wandb"]["exits"]) == (1, [1, 0])
    assert kept["mlflow"]["status"] == "FINISHED"

    assert kept["tensorboard"]["texts"]["tags", 0] == "a, b"
    assert kept["wandb"]["tags"] == set(kept["trackio"]["config"]["tags"]) == {"a", "b"}
    assert kept["mlflow"]["tags"].items() >= {"a": "true", "b": "true"}.items()
    assert "    num_steps: 5\n" in kept["tensorboard"]["texts"]["config", 0]
    assert kept["wandb"]["config"]["num_steps"] == kept["trackio"]["config"]["num_steps"] == 5
    assert kept["mlflow"]["params"]["num_steps"] == "5"

    assert {step for name, step in kept["tensorboard"]["texts"] if name == "answers/1"} == set(answers)
    tables = (json.loads(f.read_text()) for f in folder.glob("wandb/offline-run-*/files/media/table/answers*.json"))
    said = sorted(answer for table in tables for _, answer in table["data"])
    assert said == sorted(answer["answer"] for (answer,) in answers.values())
    assert kept["mlflow"]["answers"] == {f"answers/step_{step}.json": table for step, table in answers.items()}
    assert kept["trackio"]["answers"] == answers


@pytest.mark.parametrize("callback", ["{tests.runs.failing.Failing: {how: kill}}", "tests.runs.failing.Stuck"])
@pytest.mark.usefixtures("services_here")
def test_a_run_whose_other_rank_dies_has_failed_in_its_trackers(
    tmp_path, model_dir, mlflow_server, monkeypatch, callback
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    project = f"project of {tmp_path.name}"
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat(f"question {i}", f"answer {i}") for i in range(8)])
    words = [f"model.path={model_dir}", f"train_datasets={chats}", "num_workers=0", "num_steps=5"]
    words += [f"project_name={project}", "logger=[mlflow]", "placement.num_gpus_per_node=2"]
    done = burnish("train", *words, f"callbacks=[{callback}]", folder=tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < 15
    assert done.returncode == 1, done.stderr
    kept = of_mlflow(mlflow_server, project=project)
    assert (kept["status"], [step for step, _ in kept["losses"]]) == ("FAILED", [1, 2]), done.stderr
