"""``burnish bench`` through the real command line, and the parts it is made of."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from burnish.bench.measure import BenchReport
from burnish.bench.rows import draw_lengths, write_rows
from burnish.bench.watch import Measured
from burnish.cli.main import main
from burnish.data.store import open_store
from tests.toys import row, write_jsonl

TINY = ["steps=2", "warmup=1", "batch_size=4", "max_length=64", "mean=20"]


def bench(capsys, *words):
    status = main(["bench", *words, *TINY, "--json"])
    said = capsys.readouterr()
    assert status == 0, said.err
    return json.loads(said.out)


def test_a_shape_is_measured_on_rows_of_random_tokens(model_dir, capsys):
    found = bench(capsys, f"model.path={model_dir}", "lengths=fixed", "targets=0.5")["Burnish"]
    assert (found["steps"], found["tokens"], found["mfu"]) == (2, 2 * 4 * 20, None)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    assert 0 < found["data_wait"] < 1
    assert 0 <= found["memory_above_start_gib"] < found["memory_peak_gib"]
    assert found["loss"] == pytest.approx(np.log(128), rel=0.1)


def test_a_store_is_measured_in_a_run_of_its_own_file(model_dir, tmp_path, capsys):
    store = write_jsonl(tmp_path / "rows.jsonl", [row([3, 4, 5, 6, 7], [0, 0, 1, 1, 1])] * 8)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model.path: {model_dir}\npretokenized_dataset_paths: [{store}]\neval_pretokenized_dataset_paths: [{store}]\n"
        f"eval_interval: 1\nckpt_path: {tmp_path / 'ckpt'}\nckpt_interval: 1\nlog_dir: {tmp_path / 'runs'}\n"
    )
    found = bench(capsys, str(file), "remove_microbatch_padding=false")
    assert found["Burnish"]["tokens"] == 2 * 4 * 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "rows.jsonl", "run.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lengths=gauss"], "lengths='gauss': is no distribution"),
        (["lengths=fixed", "train_datasets=x.jsonl"], "the config names data with lengths of its own"),
        (["steps=0"], "at least one step"),
        (["steps=many"], "steps='many'"),
        (["cv=wide"], "cv='wide': is no number"),
        (["compare=nobody"], "compare='nobody': is nobody known"),
        (["batch_sise=4"], "config: 1 problem\n  batch_sise='4': there is no such key"),
        (["model.path=/no/such/model"], "no such folder"),
    ],
)
def test_what_cannot_be_measured_is_named(words, said, capsys):
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_comparison_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "compare=trl"]) == 2
    assert "pip install trl" in capsys.readouterr().err


def test_a_side_that_fails_is_quoted(model_dir, monkeypatch, capsys, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(["bench", *TINY, f"model.path={model_dir}"]) == 2
    assert "bench, Burnish: ended with status 3 and said:\nout of luck" in capsys.readouterr().err


def measured(**changes):
    numbers = {
        "steps": 2,
        "tokens": 100,
        "seconds": 4.0,
        "cpu_seconds": 5.0,
        "mfu": 0.5,
        "data_wait": None,
        "loss": 1.0,
    }
    return Measured(**{**numbers, "memory_peak_gib": 2.0, "memory_above_start_gib": 0.5, **changes})


def test_the_table_has_both_sides_and_their_ratio():
    report = BenchReport(
        {"Burnish": measured(), "TRL": measured(seconds=6.0, cpu_seconds=10.0, memory_above_start_gib=1.0)}
    )
    assert "| Burnish | 25 | 20 | 2.000 | 50.0% | 2.00 | 0.50 | - | 1.0000 |" in report.to_text()
    assert report.to_text().endswith(
        "ours by theirs: 1.50 in tokens/s, 2.00 in tokens/CPU s, 0.50 in memory above the start"
    )
    assert report.to_json()["ratios"]["tokens/s"] == 1.5
    assert "ours by theirs" not in BenchReport({"Burnish": measured()}).to_text()


def test_lengths_have_the_mean_and_the_spread_asked_for():
    drawn = draw_lengths("lognormal", count=200_000, mean=300, cv=0.5, longest=10_000)
    assert drawn.mean() == pytest.approx(300, rel=0.01)
    assert drawn.std() / drawn.mean() == pytest.approx(0.5, rel=0.02)
    assert set(draw_lengths("fixed", count=3, mean=300, cv=9, longest=200)) == {200}
    assert draw_lengths("lognormal", count=1000, mean=3, cv=3, longest=9).min() == 2


@pytest.mark.parametrize(("share", "targets"), [(0.5, [1, 5, 2]), (1.0, [1, 9, 3]), (0.0, [1, 1, 1])])
def test_rows_are_a_store_with_its_targets_at_the_end(tmp_path, share, targets):
    write_rows(tmp_path / "rows.arrow", np.array([2, 10, 4]), vocabulary=50, target_share=share)
    store = open_store(tmp_path / "rows.arrow", name="rows", max_length=64, num_embeddings=50)
    assert store.lengths.tolist() == [2, 10, 4]
    assert store.target_counts.tolist() == targets
    assert store[1].loss_mask.tolist() == sorted(store[1].loss_mask)
    with pa.memory_map(str(tmp_path / "rows.arrow")) as mapped:
        assert pa.ipc.open_file(mapped).read_all().num_rows == 3
