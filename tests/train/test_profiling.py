"""Windows of steps that torch's profiler records, and the file of what was allocated."""

import gzip
import json
import logging

import pytest
import torch

from burnish.backends.comm import alone
from burnish.train import profiling
from burnish.train.profiling import Profiler, Window, recorded_memory


def multiplied(profiler, num_steps):
    """Steps of a matrix product, each of which waits for data a quarter of its time."""
    square = torch.ones(128, 128)
    with profiler:
        for _ in range(num_steps):
            square @ square
            profiler.step({"step": 2.0, "data_wait": 0.5})


def profiled(folder, num_steps, *, window, **options):
    multiplied(Profiler(window, folder=folder / "profile", rank=3, **options), num_steps)
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("window", "num_steps", "traces"),
    [
        (Window(wait=1, warmup=1, active=2), 9, 1),
        (Window(wait=1, warmup=1, active=2), 3, 1),
        (Window(wait=0, warmup=1, active=1, repeat=2), 9, 2),
        (Window(wait=0, warmup=1, active=1, repeat=0), 6, 3),
        (Window(wait=0, warmup=1, active=1, repeat=0), 7, 3),
        (Window(wait=0, warmup=1, active=1, repeat=0), 5, 2),
        (Window(skip_first=4, wait=1, warmup=1), 6, 0),
    ],
    ids=str,
)
def test_each_window_is_a_trace_that_loads(tmp_path, window, num_steps, traces):
    files = profiled(tmp_path, num_steps, window=window)
    assert files == [f"rank_3_window_{number}.pt.trace.json.gz" for number in range(1, traces + 1)]
    for name in files:
        trace = json.loads(gzip.decompress((tmp_path / "profile" / name).read_bytes()))
        found = [event["name"] for event in trace["traceEvents"]]
        assert 1 <= found.count("aten::mm") <= window.active


def test_the_summary_names_what_took_long_and_the_wait_for_data(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="burnish"):
        profiled(tmp_path, 6, window=Window(wait=1, warmup=1, active=2), record_shapes=True)
    (line,) = [record.getMessage() for record in caplog.records if "operations by time" in record.getMessage()]
    assert "aten::mm " in line
    assert "ProfilerStep" not in line
    assert line.endswith("data wait 25.0%")
    assert 1 <= line.count("%,") + 1 <= 5


def test_stacks_for_a_flame_graph(tmp_path):
    options = {"export_type": "stacks", "with_stack": True}
    assert profiled(tmp_path, 6, window=Window(), **options) == ["rank_3_window_1.stacks.txt"]


def test_a_window_that_never_came_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="burnish"):
        assert profiled(tmp_path, 3, window=Window(skip_first=5)) == []
    assert "the first would have been step 8" in caplog.text


def test_without_a_window_nothing_is_recorded(tmp_path):
    assert profiled(tmp_path, 3, window=None) == []


def test_a_run_that_fails_leaves_its_trace(tmp_path):
    profiler = Profiler(Window(wait=0, warmup=1, active=5), folder=tmp_path)

    def fail():
        with profiler:
            for _ in range(3):
                profiler.step({"step": 1.0, "data_wait": 0.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["rank_0_window_1.pt.trace.json.gz"]


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_written_at_the_end_and_when_it_runs_out(tmp_path, monkeypatch, fails):
    """What torch would do on a GPU, written down; recording starts its allocator, which is set up before."""
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(profiling, "claim", calls.append)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    try:
        with recorded_memory(tmp_path / "run", ranks=alone()):
            calls.append("step")
            if fails:
                raise torch.OutOfMemoryError("full")
    except torch.OutOfMemoryError:
        calls.append("raised")
    expected = [torch.device("cpu"), "all", "step", str(tmp_path / "run" / "memory_rank_0.pickle"), None]
    assert calls == expected + ["raised"] * fails
    assert (tmp_path / "run").is_dir()
