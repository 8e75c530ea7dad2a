"""The functions below the command line."""

import logging
import os
import signal

import pytest

from burnish import api
from burnish.config import SFTConfig
from burnish.errors import CheckpointError
from tests.toys import chat, write_jsonl


def test_an_evaluation_of_a_checkpoint_is_never_one_of_the_base_model(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat("question", "answer")])
    config = SFTConfig(
        model={"path": str(model_dir)},
        eval_datasets=[str(rows)],
        num_workers=0,
        ckpt_path=str(tmp_path / "none"),
        resume_from="latest",
    )
    with pytest.raises(CheckpointError, match="no complete checkpoint to evaluate"):
        api.evaluate(config)


def test_a_repeated_sigterm_does_not_cost_the_report(tmp_path, monkeypatch, caplog):
    """Launchers send it to a rank as soon as another one has ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("as the command ends by it"))
    written = []

    def write_report(folders):
        os.kill(os.getpid(), signal.SIGTERM)
        written.extend(folders)
        return tmp_path / "report.html"

    monkeypatch.setattr(api, "write_report", write_report)
    try:
        with caplog.at_level(logging.INFO, logger="burnish"):
            api._report(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert written == [tmp_path]
    assert caplog.messages == [f"report: {tmp_path / 'report.html'}"]
