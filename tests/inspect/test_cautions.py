"""What check warns of, each with a number found by hand; and that it says nothing of a run that is as it should be."""

import shutil

import pytest

from burnish.api import tokenize
from burnish.assemble.run import build_run
from burnish.backends.comm import joined
from burnish.config import SFTConfig
from burnish.inspect.plan import check
from tests.toys import T3, chat, row, save_model, write_jsonl

END = 2
"""Ends a turn."""


def rows_of(first, number, *, end=END, length=6):
    """Of ``length`` ids each, half of them and the last one targets."""
    half = length // 2
    middle = [4] * (length - 2)
    return [row([10 + n % 100, *middle, end], [0] * (length - half) + [1] * half) for n in range(first, first + number)]


@pytest.fixture
def warnings(tmp_path, model_dir):
    """Of a config of rows and ``keys``; that stores have no manifest is left out."""

    def found(*data, evals=(), **keys):
        stores = [write_jsonl(tmp_path / f"train{i}.jsonl", rows) for i, rows in enumerate(data)]
        held = [write_jsonl(tmp_path / f"eval{i}.jsonl", rows) for i, rows in enumerate(evals)]
        own = {"pretokenized_dataset_paths": list(map(str, stores)), "batch_size": 4, "ckpt_path": str(tmp_path)}
        if held:
            own |= {"eval_pretokenized_dataset_paths": list(map(str, held)), "eval_interval": 1}
        report = check(SFTConfig(model={"path": str(model_dir)}, num_workers=0, **own | keys))
        assert report.problems == ()
        texts = (text.replace(f"{tmp_path}/", "") for text in report.warnings)
        return [text for text in texts if "has no manifest" not in text]

    return found


def test_nothing_is_odd(warnings):
    assert warnings(rows_of(0, 40), evals=[rows_of(40, 8)], max_length=8, num_epochs=2) == []


def test_rows_dropped_and_rows_cut(warnings):
    unmarked = [row([4, 5], [1, 0])] * 3
    assert warnings(rows_of(0, 17) + unmarked) == ["train0.jsonl: 3 of 20 rows are dropped"]
    assert warnings(rows_of(0, 18) + unmarked[:2]) == [], "a tenth"
    assert warnings(rows_of(0, 30) + rows_of(30, 10, length=8), max_length=7) == [
        "train0.jsonl: 10 of 40 rows are as long as max_length=7, most of them cut"
    ]


def test_rows_that_do_not_end(warnings):
    said = "sampled rows train no special token such as '<|im_end|>', so that the model does not learn to stop"
    assert warnings(rows_of(0, 36) + rows_of(36, 4, end=5)) == [f"train0.jsonl: 4 of 40 {said}"]
    assert warnings(rows_of(0, 38) + rows_of(38, 2, end=5)) == [], "a twentieth"
    untrained = [row([4, 5, 6, END], [0, 1, 1, 0])] * 4
    assert warnings(untrained) == [f"train0.jsonl: 4 of 4 {said}"], "the end stands there and is no target"


def test_at_most_a_thousand_rows_are_looked_at_for_their_end(warnings):
    (text,) = warnings(rows_of(0, 3000, end=5))
    assert text.startswith("train0.jsonl: 1,000 of 1,000 sampled rows train no special token")


def test_sources_drawn_too_little_and_too_often(warnings):
    # 10 steps of 4 rows, 32 of them from the first source and 8 from the second.
    data, weights = (rows_of(0, 64), rows_of(64, 8)), {"train_dataset_weights": [0.8, 0.2]}
    assert warnings(*data, num_steps=10, **weights) == [
        "train0.jsonl: only 50.0% of its 64 rows are drawn; give more steps, or a larger weight"
    ]
    # 500 rows of the second source.
    assert warnings(*data, num_steps=625, **weights) == [
        "train0.jsonl: each row is drawn 31.2 times",
        "train1.jsonl: each row is drawn 62.5 times",
    ]


def test_eval_rows_that_are_trained(warnings):
    evals = [rows_of(40, 8) + rows_of(3, 5), rows_of(60, 4), rows_of(20, 4)]
    assert warnings(rows_of(0, 16), rows_of(16, 16), evals=evals) == [
        "eval set eval0.jsonl: 5 of its 13 rows are in the training data too",
        "eval set eval2.jsonl: 4 of its 4 rows are in the training data too",
    ]


def test_weights_that_are_never_reached_or_never_kept(warnings):
    assert warnings(rows_of(0, 40), ckpt_path="", optimizer_config={"num_warmup_steps": 10}) == [
        "optimizer_config.num_warmup_steps=10: the run has 10 steps, and never reaches lr",
        "ckpt_path is empty and hf_save_interval 0: the trained weights are kept nowhere",
    ]
    assert warnings(rows_of(0, 40), optimizer_config={"num_warmup_steps": 9}) == []


def test_a_disk_without_room_for_a_checkpoint(warnings, tmp_path, monkeypatch):
    # 22,720 numbers are 12 bytes each.
    free, usage = 12 * 22_720 - 1, shutil.disk_usage(tmp_path)
    monkeypatch.setattr("burnish.inspect.cautions.shutil.disk_usage", lambda path: usage._replace(free=free))
    missing = tmp_path / "not" / "there"
    assert warnings(rows_of(0, 40), ckpt_path=str(missing)) == [
        "ckpt_path=not/there: 0.26 MiB are free on this machine's disk, and a checkpoint takes 0.26 MiB"
    ]
    free += 1
    assert warnings(rows_of(0, 40), ckpt_path=str(missing)) == []


def test_a_run_says_at_its_start_what_is_not_meant(tmp_path, model_dir, caplog):
    store, keys = (
        write_jsonl(tmp_path / "store.jsonl", rows_of(0, 8)),
        {"batch_size": 4, "log_dir": str(tmp_path / "runs")},
    )
    data = {"model": {"path": str(model_dir)}, "pretokenized_dataset_paths": [str(store)], "num_workers": 0}

    def said(**own):
        caplog.clear()
        config = SFTConfig(**data, **keys, **own)
        with (
            caplog.at_level("INFO", logger="burnish"),
            joined("cpu") as ranks,
            build_run(config, ranks=ranks, interrupted=lambda: False) as trainer,
        ):
            trainer.train()
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if any(word in text for word in ("kept nowhere", "another run", "nothing left"))]

    place = str(tmp_path / "ckpts")
    assert said(num_steps=1) == ["ckpt_path is empty and hf_save_interval 0: the trained weights are kept nowhere"]
    assert said(num_steps=2, ckpt_path=place) == []
    assert said(num_steps=3, ckpt_path=place, resume_from="latest") == []
    assert said(num_steps=2, ckpt_path=place, resume_from="latest") == [
        "there is nothing left to do; to go on, give more num_steps or num_epochs"
    ]
    assert said(num_steps=1, ckpt_path=place) == [
        f"{place} has checkpoints of another run, up to step 3: give it a ckpt_path of its own, "
        "or resume_from=latest to go on"
    ]


def test_what_is_wrong_for_every_dataset_is_said_once(tmp_path, model_dir):
    files = [str(write_jsonl(tmp_path / f"{n}.jsonl", [chat("a", "b")] * 4)) for n in range(3)]
    keys = {"model": {"path": str(model_dir)}, "num_workers": 0, "cache_dir": str(tmp_path / "cache")}
    report = check(SFTConfig(**keys, train_datasets=files, chat_template="nofile"))
    assert [problem.message for problem in report.problems] == [
        "chat_template=nofile: is neither a template nor a file"
    ]


def test_a_store_of_another_template_and_one_that_says_nothing(tmp_path, model_dir):
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(8)])
    other = save_model(tmp_path / "other", template=T3)
    tokenize(SFTConfig(model={"path": str(other)}, train_datasets=[str(chats)]), out=str(tmp_path / "store"))
    plain = write_jsonl(tmp_path / "plain.jsonl", rows_of(0, 8))
    keys = {"pretokenized_dataset_paths": [str(tmp_path / "store"), str(plain)], "allow_store_mismatch": True}
    report = check(SFTConfig(model={"path": str(model_dir)}, ckpt_path=str(tmp_path), batch_size=4, **keys))
    assert report.problems == ()
    mismatch, unsaid = (text.replace(f"{tmp_path}/", "") for text in report.warnings)
    assert mismatch.startswith("store: was tokenized for another model: template_hash ")
    assert unsaid == "plain.jsonl: has no manifest, so its tokenizer and chat template are not known to be the model's"
