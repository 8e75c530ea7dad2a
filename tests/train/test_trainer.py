"""The loop, with a backend that only counts."""

import itertools
import json
import logging

import pytest

from burnish.backends.comm import alone
from burnish.errors import CheckpointError, DataError
from burnish.train.cadence import Cadence
from burnish.train.callbacks import Callback
from burnish.train.checkpoint import Checkpointer, complete_checkpoints
from burnish.train.export import Exporter
from burnish.train.generation import Questions
from tests.train.fakes import CountingBackend, make_trainer


def steps_saved(tmp_path):
    return sorted(complete_checkpoints(tmp_path / "ckpt"))


def test_metrics_of_a_step_and_its_evaluation_stand_in_one_line():
    trainer, backend, recorder = make_trainer(eval_at=Cadence(3), eval_first=True)
    assert trainer.train().step == backend.weight == 10
    assert [step for step, _ in recorder.lines] == list(range(11))
    assert recorder.steps_with("eval/held/loss") == [0, 3, 6, 9, 10]
    assert recorder.steps_with("train/loss") == list(range(1, 11))
    assert recorder.lines[0][1].keys() == {"eval/held/loss", "eval/held/perplexity", "eval/held/num_targets"}
    assert {m["eval/held/loss"] for _, m in recorder.lines if "eval/held/loss" in m} == {2.0}
    assert recorder.lines[4][1]["train/loss"] == 2.5
    names = "loss grad_norm lr num_tokens num_targets tokens_per_second tokens_per_second_per_gpu mfu"
    for name in f"{names} packing_efficiency epoch total_tokens".split():
        assert f"train/{name}" in recorder.lines[1][1]
    assert {"timing/step", "timing/data_wait", "timing/optimizer"} <= recorder.lines[1][1].keys()


@pytest.mark.parametrize(("interval", "evaluated"), [(0, [7]), (7, [7]), (2, [2, 4, 6, 7])])
def test_the_last_step_is_evaluated_once(interval, evaluated):
    trainer, _, recorder = make_trainer(num_steps=7, eval_at=Cadence(interval))
    trainer.train()
    assert recorder.steps_with("eval/held/loss") == evaluated


def questions(every):
    return Questions(("who?",), [[5]], repr, Cadence(every), max_new_tokens=2)


@pytest.mark.parametrize(
    ("every", "first", "answered"),
    [(1, True, [0, 2, 4, 6, 7]), (2, True, [0, 4, 7]), (2, False, [4, 7]), (9, False, [7])],
)
def test_prompts_are_answered_at_every_nth_evaluation_and_at_the_last(every, first, answered):
    trainer, _, recorder = make_trainer(num_steps=7, eval_at=Cadence(2), eval_first=first, questions=questions(every))
    trainer.train()
    assert recorder.answers == [(step, [("who?", f"[5, {step}]")]) for step in answered]


def test_prompts_need_no_eval_set_and_log_no_empty_line():
    trainer, _, recorder = make_trainer(
        num_steps=3, eval_at=Cadence(2), eval_first=True, eval_sets={}, questions=questions(1)
    )
    trainer.train()
    assert [step for step, _ in recorder.answers] == [0, 2, 3]
    assert [step for step, _ in recorder.lines] == [1, 2, 3]


def test_prompts_are_answered_at_the_evaluation_at_which_a_callback_stops(caplog):
    class Stops(Callback):
        def on_evaluate(self, progress, requests, *, metrics):
            requests.stop = progress.step >= 4 and metrics["eval/held/loss"] > 0

    trainer, _, recorder = make_trainer(eval_at=Cadence(2), questions=questions(9), callbacks=[Stops()])
    with caplog.at_level(logging.INFO, logger="burnish"):
        assert trainer.train().step == 4
    assert [step for step, _ in recorder.answers] == [4]
    (said,) = [text for text in caplog.messages if "asks to stop" in text]
    assert said.startswith("callback ")
    assert said.endswith("Stops asks to stop, at step 4")


def test_an_evaluation_of_prompts_alone_is_none_for_callbacks():
    class Never(Callback):
        def on_evaluate(self, progress, requests, *, metrics):
            raise AssertionError(metrics)

    options = {"eval_sets": {}, "questions": questions(1), "callbacks": [Never()]}
    trainer, _, recorder = make_trainer(num_steps=4, eval_at=Cadence(2), eval_first=True, **options)
    trainer.train()
    assert [step for step, _ in recorder.answers] == [0, 2, 4]


def test_evaluations_are_counted_on_after_a_resume(tmp_path):
    keys = {"eval_at": Cadence(2), "questions": questions(3)}
    make_trainer(tmp_path, num_steps=4, **keys)[0].train()
    trainer, _, recorder = make_trainer(tmp_path, num_steps=9, resume_from="latest", **keys)
    trainer.train()
    assert [step for step, _ in recorder.answers] == [6, 9]


@pytest.mark.parametrize("stop", [1, 3, 9, 10, 13])
def test_resume_draws_the_very_next_rows(tmp_path, stop):
    whole, backend, _ = make_trainer(num_steps=25)
    whole.train()
    first, before, _ = make_trainer(tmp_path, num_steps=stop)
    first.train()
    second, after, _ = make_trainer(tmp_path, resume_from="latest", num_steps=25)
    second.train()
    assert before.rows + after.rows == backend.rows
    assert after.weight == 25


def test_a_changed_file_is_found_on_resume(tmp_path):
    make_trainer(tmp_path, num_steps=2)[0].train()
    file = tmp_path / "ckpt" / "global_step_2" / "state.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(CheckpointError, match=r"state\.json: is not as it was written"):
        make_trainer(tmp_path, resume_from="latest")


def test_a_link_to_a_checkpoint_is_removed_without_what_it_points_to(tmp_path):
    make_trainer(tmp_path, num_steps=2)[0].train()
    (tmp_path / "ckpt" / "global_step_2").rename(tmp_path / "kept")
    (tmp_path / "ckpt" / "global_step_2").symlink_to(tmp_path / "kept")
    make_trainer(tmp_path, num_steps=4, keep=1, resume_from="latest")[0].train()
    assert [p.name for p in (tmp_path / "ckpt").iterdir()] == ["global_step_4"]
    assert (tmp_path / "kept" / "COMPLETE").is_file()


def test_a_checkpoint_takes_the_place_of_a_link_or_a_file(tmp_path):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "ckpt" / "global_step_2").symlink_to(tmp_path / "other")
    (tmp_path / "ckpt" / "global_step_4").write_text("a file")
    make_trainer(tmp_path, num_steps=4, save_at=Cadence(2))[0].train()
    assert steps_saved(tmp_path) == [2, 4]
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == ["global_step_2", "global_step_4"]
    assert not any((tmp_path / "other").iterdir())


def test_a_checkpoint_is_verified_before_anything_of_it_is_read(tmp_path):
    """Also where only its weights are taken."""
    make_trainer(tmp_path, num_steps=2)[0].train()
    found = Checkpointer(str(tmp_path / "ckpt"), ranks=alone(), run={}, config={}).find("latest")
    assert found == tmp_path / "ckpt" / "global_step_2"
    (found / "backend" / "weight.json").write_text("7")
    for resume_from in ("latest", str(found)):
        with pytest.raises(CheckpointError, match=r"weight\.json: is not as it was written"):
            Checkpointer(str(tmp_path / "ckpt"), ranks=alone(), run={}, config={}).find(resume_from)


def test_a_run_that_differs_is_stopped_and_every_difference_named(tmp_path):
    make_trainer(tmp_path, num_steps=2, run={"batch_size": 4, "seed": 42, "max_length": 8})[0].train()
    with pytest.raises(CheckpointError, match="batch_size was 4, is 8; seed was 42, is 43"):
        make_trainer(tmp_path, resume_from="latest", run={"batch_size": 8, "seed": 43, "max_length": 8})


def test_a_fresh_run_replaces_a_checkpoint_of_the_same_step(tmp_path):
    make_trainer(tmp_path, num_steps=2)[0].train()
    make_trainer(tmp_path, num_steps=2, backend=CountingBackend(bad_steps=(1,)))[0].train()
    assert json.loads((tmp_path / "ckpt" / "global_step_2" / "backend" / "weight.json").read_text()) == 1
    assert [p.name for p in (tmp_path / "ckpt").iterdir()] == ["global_step_2"]


@pytest.mark.parametrize(("interval", "exported"), [(4, [4, 8, 10]), (5, [5, 10])])
def test_exports_when_due_and_at_the_end(tmp_path, interval, exported):
    trainer, backend, _ = make_trainer(exporter=Exporter(str(tmp_path), Cadence(interval), alone()))
    trainer.train()
    assert backend.exports == [f"global_step_{step}" for step in exported]


def test_bad_steps_are_skipped_and_too_many_in_a_row_stop_the_run_with_a_checkpoint(tmp_path):
    trainer, backend, recorder = make_trainer(tmp_path, backend=CountingBackend(bad_steps=(2, 3, 5, 6, 7)))
    with pytest.raises(DataError, match="not finite in 3 steps in a row"):
        trainer.train()
    assert backend.weight == 2
    assert [m["train/skipped"] for _, m in recorder.lines] == [0, 1, 1, 0, 1, 1, 1]
    assert steps_saved(tmp_path) == [7]


def test_a_signal_saves_after_the_step_at_hand(tmp_path):
    seen = itertools.count()
    trainer, _, recorder = make_trainer(tmp_path, eval_at=Cadence(0), interrupted=lambda: next(seen) >= 4)
    assert trainer.train().step == 4
    assert steps_saved(tmp_path) == [4]
    assert recorder.steps_with("eval/held/loss") == []


def test_a_run_that_is_stopped_before_its_first_step_saves_nothing(tmp_path):
    trainer, _, recorder = make_trainer(tmp_path, interrupted=lambda: True)
    assert trainer.train().step == 0
    assert steps_saved(tmp_path) == []
    assert recorder.lines == []


def test_a_step_that_is_saved_already_is_not_saved_again_by_a_signal(tmp_path):
    seen = itertools.count()
    saved = []

    class Notes(Callback):
        def on_save(self, progress, requests, *, folder):
            saved.append(progress.step)

    options = {"save_at": Cadence(2), "callbacks": [Notes()]}
    trainer, _, _ = make_trainer(tmp_path, interrupted=lambda: next(seen) >= 4, **options)
    assert trainer.train().step == 4
    assert saved == [2, 4]


def test_a_callback_asks_to_save_to_evaluate_and_to_stop(tmp_path):
    class Asks(Callback):
        def on_step_end(self, progress, requests, *, batch, result):
            requests.save = progress.step == 2
            requests.evaluate = progress.step == 3
            requests.stop = progress.step == 5

    trainer, _, recorder = make_trainer(tmp_path, callbacks=[Asks()], eval_at=Cadence(0))
    assert trainer.train().step == 5
    assert steps_saved(tmp_path) == [2, 5]
    assert recorder.steps_with("eval/held/loss") == [3, 5]


def test_what_is_asked_in_an_evaluation_is_served_in_the_same_step(tmp_path):
    class Best(Callback):
        def __init__(self):
            self.evaluated = []

        def on_evaluate(self, progress, requests, *, metrics):
            self.evaluated.append(progress.step)
            requests.save = progress.step == 2
            requests.stop = progress.step == 6

        def state_dict(self):
            return {"evaluated": self.evaluated}

    best = Best()
    trainer, _, recorder = make_trainer(tmp_path, callbacks=[best], eval_at=Cadence(2))
    assert trainer.train().step == 6
    assert steps_saved(tmp_path) == [2, 6]
    assert recorder.steps_with("eval/held/loss") == best.evaluated == [2, 4, 6]
    state = json.loads((tmp_path / "ckpt" / "global_step_2" / "state.json").read_text())
    assert state["callbacks"][0]["state"] == {"evaluated": [2]}, "a checkpoint knows of the evaluation of its step"


def test_a_signal_in_the_last_step_cuts_nothing_short(tmp_path):
    trainer, backend, recorder = make_trainer(
        tmp_path,
        num_steps=4,
        eval_at=Cadence(0),
        exporter=Exporter(str(tmp_path), Cadence(3), alone()),
        interrupted=lambda: trainer.progress.step == 4,
    )
    trainer.train()
    assert recorder.steps_with("eval/held/loss") == [4]
    assert backend.exports == ["global_step_3", "global_step_4"]


def test_a_run_cut_short_is_saved_but_not_exported(tmp_path):
    trainer, backend, _ = make_trainer(
        tmp_path, exporter=Exporter(str(tmp_path), Cadence(3), alone()), interrupted=lambda: trainer.progress.step == 5
    )
    trainer.train()
    assert steps_saved(tmp_path) == [5]
    assert backend.exports == ["global_step_3"]


def test_a_checkpoint_begun_before_a_failure_is_completed(tmp_path):
    class Slow(CountingBackend):
        def save(self, folder):
            saved = super().save(folder)
            saved.done = False
            return saved

    class Breaks(Callback):
        def on_step_begin(self, progress, requests):
            if progress.step == 5:
                raise ZeroDivisionError("mine")

    trainer, _, _ = make_trainer(tmp_path, backend=Slow(), save_at=Cadence(5), callbacks=[Breaks()])
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.train()
    assert steps_saved(tmp_path) == [5]


def test_callback_state_is_kept(tmp_path):
    class Counts(Callback):
        seen = 0

        def on_step_end(self, progress, requests, *, batch, result):
            self.seen += 1

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    make_trainer(tmp_path, num_steps=3, callbacks=[Counts()])[0].train()
    again = Counts()
    make_trainer(tmp_path, num_steps=5, resume_from="latest", callbacks=[again])[0].train()
    assert again.seen == 5
