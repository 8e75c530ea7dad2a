"""The commands, end to end on a two-layer model."""

import json

import pytest

from tests.runs.commands import burnish, metrics
from tests.toys import T3, chat, row, save_model, write_jsonl

CHATS = [chat(f"question {i}", f"answer {i}") for i in range(120)]


@pytest.fixture
def chats(tmp_path):
    return write_jsonl(tmp_path / "chats.jsonl", CHATS)


def test_the_command_of_the_original_keys(tmp_path, model_dir, chats):
    result = burnish(
        *["train", "strategy=fsdp", f"model.path={model_dir}", f"train_datasets=['{chats}']"],
        *["train_dataset_splits=['train[:100]']", "max_length=512", "num_steps=10", "batch_size=4"],
        folder=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    steps = metrics(tmp_path)
    assert sorted(steps) == list(range(1, 11))
    assert steps[10]["train/epoch"] == 0.4, "100 rows are 25 steps"
    assert "step 10/10" in result.stderr
    assert "max_length: 512" in result.stderr, "the effective config is printed"
    assert (tmp_path / "runs" / "sft" / "config.yaml").is_file()


def test_a_report_that_cannot_be_written_fails_no_run(tmp_path, model_dir, chats):
    (tmp_path / "runs" / "sft" / "report.html").mkdir(parents=True)
    result = burnish("train", f"model.path={model_dir}", f"train_datasets={chats}", "num_steps=1", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "WARNING no report was written: runs/sft/report.html: cannot be written: Is a directory" in result.stderr
    assert sorted(metrics(tmp_path)) == [1]


def test_a_misspelt_key(tmp_path):
    result = burnish("train", "num_step=5", "model.path=x", "train_datasets=y", folder=tmp_path)
    assert result.returncode == 2
    assert "num_steps" in result.stderr
    assert "Traceback" not in result.stderr


def test_three_mistakes_are_reported_together(tmp_path):
    result = burnish(
        "train", "model.path=x", "train_datasets=y", "batch_size=0", "max_lenght=5", "eval_interval=3", folder=tmp_path
    )
    assert result.returncode == 2
    assert all(key in result.stderr for key in ("batch_size", "max_length", "eval_interval"))


def test_stores_and_datasets_together_exit_before_anything_loads(tmp_path):
    result = burnish(
        *["train", "model.path=nowhere", "train_datasets=/no/such/file", "pretokenized_dataset_paths=/no/such/store"],
        folder=tmp_path,
    )
    assert result.returncode == 2
    assert "pretokenized_dataset_paths" in result.stderr
    assert "no such" not in result.stderr


def test_check_says_what_a_run_would_do(tmp_path, model_dir, chats):
    rows = [row([4, 5, 6], [0, 1, 1]), row([7, 8, 9], [1, 0, 0])]
    store = write_jsonl(tmp_path / "store.jsonl", rows)
    result = burnish(
        *["check", "--json", f"model.path={model_dir}", f"train_datasets={chats}", "max_length=512"],
        *[f"eval_pretokenized_dataset_paths={store}", "num_epochs=2", "device=a100-40g", "mfu=0.25"],
        folder=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    (source,), (held,) = report["sources"], report["eval_sources"]
    assert (source["rows"], source["kept"], source["dropped"]) == (120, 120, {})
    length = len("user\nquestion 0\nassistant\nanswer 0\n") + 4
    assert source["tokens"] == 10 * length + 90 * (length + 2) + 20 * (length + 4)
    assert source["targets"] == 10 * 9 + 90 * 10 + 20 * 11
    expected = {"name": "store.jsonl", "rows": 2, "kept": 1, "dropped": {"no_target": 1}, "tokens": 3, "targets": 2}
    assert {key: held[key] for key in expected} == expected
    assert (report["steps_per_epoch"], report["num_steps"], report["problems"]) == (30, 60, [])
    assert report["tokens_per_step"] == source["tokens"] / 30
    assert report["packing_efficiency"] == 1.0
    assert report["device"] == {"name": "a100-40g", "memory_gib": 40.0, "peak_flops": 312e12}
    assert (report["num_ranks"], report["mfu"], report["fits"], report["passes"]) == (4, 0.25, True, [2.0])
    assert 0 < report["seconds"] < 1
    memory = report["memory"]
    assert memory["weights"] == 22_720, "a quarter of the numbers of the model, each of four bytes"
    assert memory["total"] == sum(size for name, size in memory.items() if name not in ("total", "host"))
    assert [text.partition(":")[0] for text in report["warnings"]] == [
        "store.jsonl",
        "store.jsonl",
        "ckpt_path is empty and hf_save_interval 0",
    ], "it has no manifest, and half of its rows are dropped"


def test_check_prints_problems_of_config_and_data_as_json(tmp_path, model_dir, chats):
    result = burnish(
        "check", "--json", "model.path=/no/model", f"train_datasets={chats}", "eval_interval=2", folder=tmp_path
    )
    assert result.returncode == 2
    problems = json.loads(result.stdout)["problems"]
    assert {p["key"] for p in problems} == {"model.path", "eval_interval"}
    result = burnish("check", "--json", f"model.path={model_dir}", "train_datasets=/no/rows.jsonl", folder=tmp_path)
    assert result.returncode == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.keys() == {"key", "value", "message", "fix"}
    assert "/no/rows.jsonl" in problem["value"]


def test_tokenized_rows_train_like_the_chats_they_came_from(tmp_path, model_dir, chats):
    common = [f"model.path={model_dir}", "max_length=512", "num_steps=4"]
    made = burnish("tokenize", *common, f"train_datasets={chats}", f"out={tmp_path / 'store'}", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    for name, data in (("raw", f"train_datasets={chats}"), ("store", f"pretokenized_dataset_paths={tmp_path}/store")):
        trained = burnish("train", *common, data, f"run_name={name}", folder=tmp_path)
        assert trained.returncode == 0, trained.stderr
    raw, store = metrics(tmp_path, "raw"), metrics(tmp_path, "store")
    save_model(tmp_path / "other", template=T3)
    for path in (tmp_path / "store", tmp_path):  # also when a folder above it is named
        other = [f"model.path={tmp_path / 'other'}", f"pretokenized_dataset_paths={path}"]
        refused = burnish("check", "--json", *other, folder=tmp_path)
        assert refused.returncode == 2
        assert "template_hash" in refused.stdout
    assert [raw[s]["train/loss"] for s in raw] == [store[s]["train/loss"] for s in raw]


def test_inspect_rows_marks_what_is_trained(tmp_path, model_dir, chats):
    common = ["inspect", "rows", f"model.path={model_dir}", f"train_datasets={chats}"]
    printed = burnish(*common, "row=3", folder=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert "⟦answer 3<|im_end|>⟧" in printed.stdout
    written = burnish(*common, "sample=2", f"html={tmp_path / 'rows.html'}", folder=tmp_path)
    assert (written.returncode, written.stdout) == (0, f"{tmp_path / 'rows.html'}\n"), written.stderr
    assert (tmp_path / "rows.html").read_text().count("<mark>answer ") == 2


def test_evaluate_and_export_a_checkpoint(tmp_path, model_dir, chats):
    common = [f"model.path={model_dir}", f"eval_datasets={chats}", "eval_dataset_names=held"]
    trained = burnish(
        "train", *common, f"train_datasets={chats}", "num_steps=3", "ckpt_path=ckpt", "ckpt_interval=2", folder=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    last = {k.rpartition("/")[2]: v for k, v in metrics(tmp_path)[3].items() if k.startswith("eval/held/")}
    evaluated = burnish("eval", "--json", *common, "resume_from=ckpt/global_step_3", folder=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout) == {"held": last}
    assert "INFO evaluating ckpt/global_step_3\n" in evaluated.stderr
    exported = burnish("export", "ckpt/global_step_3", "out=exported", folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    refused = burnish("export", "ckpt/global_step_3", "out=exported", folder=tmp_path)
    assert (refused.returncode, "is not empty" in refused.stderr) == (2, True)
    again = burnish("eval", "--json", "model.path=exported", *common[1:], folder=tmp_path)
    assert json.loads(again.stdout)["held"]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert "INFO evaluating exported\n" in again.stderr
