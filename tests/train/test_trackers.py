"""Trackers: the JSON-lines file and the console."""

import io
import json
import os
import resource
from contextlib import contextmanager, suppress

from burnish.train.trackers import ConsoleTracker, JsonlTracker, Trackers


def test_numbers_are_unrounded_and_lines_are_json(tmp_path):
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl", resumed=False)
    tracker.log({"train/loss": 0.1 + 0.2, "train/mfu": None, "train/grad_norm": float("inf")}, step=1)
    tracker.close(failed=False)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 1,
        "train/loss": 0.30000000000000004,
        "train/mfu": None,
        "train/grad_norm": None,
    }


def test_a_fresh_start_keeps_the_old_files(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for run in range(3):
        tracker = JsonlTracker(file, resumed=False)
        tracker.log({"run": run}, step=1)
        tracker.close(failed=False)
    found = {p.name: json.loads(p.read_text())["run"] for p in tmp_path.iterdir()}
    assert found == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}


def test_a_resume_appends_also_after_a_torn_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "tra')
    tracker = JsonlTracker(file, resumed=True)
    tracker.log({}, step=2)
    tracker.close(failed=False)
    assert file.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "tra', '{"step": 2}']


def test_answers_stand_beside_the_metrics_and_go_with_them(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    for resumed, said in ((False, "old"), (False, "é\n"), (True, "more")):
        tracker = JsonlTracker(file, resumed=resumed)
        tracker.log_answers([("who?", said), ("why?", "")], step=3)
        tracker.close(failed=False)
    lines = [json.loads(line) for line in (file.parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[:2] == [{"step": 3, "prompt": "who?", "answer": "é\n"}, {"step": 3, "prompt": "why?", "answer": ""}]
    assert [line["answer"] for line in lines] == ["é\n", "", "more", ""]
    assert {f.name for f in file.parent.iterdir()} == {
        *("metrics.jsonl", "metrics.1.jsonl", "answers.jsonl", "answers.1.jsonl"),
    }
    assert '"old"' in (file.parent / "answers.1.jsonl").read_text()


def test_old_files_get_one_number_though_one_of_them_is_missing(tmp_path):
    (tmp_path / "answers.1.jsonl").write_text("")
    for _ in range(2):
        JsonlTracker(tmp_path / "metrics.jsonl", resumed=False).close(failed=False)
    assert (tmp_path / "metrics.2.jsonl").exists()


def test_the_console_shows_the_beginning_of_an_answer_on_one_line():
    stream = io.StringIO()
    console = ConsoleTracker(stream, num_steps=50, first_step=0)
    console.log_answers([("who\x1b[2J?", "a\nb" * 100)], step=4)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step 4: 'who\\x1b[2J?' -> 'a\\nb")
    assert line.endswith("'...")
    assert len(line) < 200


LINE = {"train/loss": 2.0, "train/lr": 1e-3, "train/grad_norm": 1.0, "train/tokens_per_second": 5e3, "train/epoch": 0.5}


def test_a_log_gets_plain_lines_but_not_one_a_step():
    stream = io.StringIO()
    console = ConsoleTracker(stream, num_steps=50, first_step=0)
    for step in range(1, 51):
        console.log(LINE | ({"eval/held/loss": 3.0} if step == 20 else {}), step=step)
    console.close(failed=False)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "20/50", "20:", "50/50"]
    assert lines[0].startswith("step 1/50  loss 2.0000  lr 0.001  grad 1  5,000 tokens/s  epoch 0.50  ")
    assert lines[2] == "step 20: eval/held/loss 3.0000"


def test_a_terminal_gets_one_line_that_changes():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    console = ConsoleTracker(stream, num_steps=3, first_step=0)
    for step in (1, 2, 3):
        console.log(LINE, step=step)
    console.close(failed=False)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") == 3


@contextmanager
def no_file_longer_than(num_bytes):
    """As a full disk: what is written beyond is an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_no_run_and_what_is_missing_is_said(tmp_path, caplog):
    trackers = Trackers([JsonlTracker(tmp_path / "metrics.jsonl", resumed=False)], identity="a run")
    with no_file_longer_than(250):
        for step in range(1, 41):
            trackers.log({"x": "y" * 1000 if step > 2 else 1}, step=step)
        trackers.log_answers([("why?", "z" * 1000)], step=40)
        assert len(caplog.records) == 1, "the first time only"
    trackers.log({"x": 1}, step=41)
    trackers.close(failed=False)
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "JsonlTracker cannot write ([Errno 27] File too large); training goes on"
    assert last == "JsonlTracker: 39 writes failed, what it wrote is not complete"
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (steps[:2], steps[-1]) == ([1, 2], 41)
    assert steps == sorted(steps), "whole lines, and those that waited for room"


def test_a_disk_that_stays_full_does_not_fail_the_end_of_a_run(tmp_path, caplog):
    trackers = Trackers([JsonlTracker(tmp_path / "metrics.jsonl", resumed=False)], identity="a run")
    with no_file_longer_than(1):
        trackers.log({"x": 1}, step=1)
        trackers.close(failed=False)
    assert caplog.messages[-1] == "JsonlTracker: 2 writes failed, what it wrote is not complete"


def test_a_console_that_is_gone_ends_no_run(tmp_path, caplog):
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    jsonl = JsonlTracker(tmp_path / "metrics.jsonl", resumed=False)
    trackers = Trackers([ConsoleTracker(stream, num_steps=2, first_step=0), jsonl], identity="a run")
    for step in (1, 2):
        trackers.log(LINE, step=step)
    trackers.close(failed=False)
    assert caplog.messages[0] == "ConsoleTracker cannot write ([Errno 32] Broken pipe); training goes on"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    with suppress(BrokenPipeError):
        stream.close()
