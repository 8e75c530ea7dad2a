"""The functions below the command line."""

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
