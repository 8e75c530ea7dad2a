"""B70: every record has its step; within an attempt steps never go back."""

from burnish.train.cadence import Cadence
from burnish.train.callbacks import Callback
from tests.train.fakes import make_trainer


class CrashesAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_log(self, progress, requests, *, metrics):
        if progress.step == self.step:
            raise RuntimeError("crash")


def test_steps_after_a_crash_appear_again_with_equal_values(tmp_path):
    options = {"eval_at": Cadence(3), "eval_first": True, "save_at": Cadence(3)}
    trainer, _, first = make_trainer(tmp_path, callbacks=[CrashesAfter(8)], **options)
    try:
        trainer.train()
    except RuntimeError:
        trainer._checkpointer.finish()
    trainer, _, second = make_trainer(tmp_path, resume_from="latest", **options)
    trainer.train()

    assert [step for step, _ in first.lines] == list(range(9))
    assert [step for step, _ in second.lines] == [7, 8, 9, 10]
    losses = [{step: m["train/loss"] for step, m in r.lines if step} for r in (first, second)]
    assert {s: losses[0][s] for s in (7, 8)} == {s: losses[1][s] for s in (7, 8)}
    assert first.steps_with("eval/held/loss") == [0, 3, 6]
    assert "train/loss" not in first.lines[0][1]
    assert {"train/loss", "eval/held/loss"} <= first.lines[3][1].keys(), "train and eval of a step share its line"
