"""B49: the learning rate of a resumed run is that of an unbroken one, to the last digit; a new one is refused."""

import json

import pytest

from burnish import SFTTrainer
from burnish.errors import CheckpointError
from tests.parity.runs import config_of, store_data

OPTIMIZER = {"lr": 1.0, "weight_decay": 0.1, "scheduler": "linear", "num_warmup_steps": 4, "max_grad_norm": 1e-3}
RATES = [0.25, 0.5, 0.75, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


def rates(folder):
    lines = [json.loads(line) for line in (folder / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/lr"] for line in lines}


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_rates_over_a_resume(tmp_path, model_dir, stop):
    options = {"model_dir": model_dir, "num_steps": 12, "optimizer_config": OPTIMIZER, "hf_save_interval": 0}
    options |= store_data(tmp_path)
    stops = [{"tests.parity.test_resume.StopAt": {"step": stop}}]
    SFTTrainer(config_of(tmp_path, callbacks=stops, **options)).train()
    assert list(rates(tmp_path).values()) == RATES[:stop]
    SFTTrainer(config_of(tmp_path, resume_from="latest", **options)).train()
    assert rates(tmp_path) == dict(enumerate(RATES, 1))


def test_another_rate_on_the_command_line_is_refused_by_name(tmp_path, model_dir):
    options = {"model_dir": model_dir, "hf_save_interval": 0} | store_data(tmp_path)
    SFTTrainer(config_of(tmp_path, num_steps=2, optimizer_config=OPTIMIZER, **options)).train()
    changed = {"resume_from": "latest", "num_steps": 4, "optimizer_config": OPTIMIZER | {"lr": 0.5}}
    with pytest.raises(CheckpointError, match=r"optimizer_config\.lr was 1\.0, is 0\.5"):
        SFTTrainer(config_of(tmp_path, **changed, **options)).train()
    SFTTrainer(config_of(tmp_path, resume_allow_changes=True, **changed, **options)).train()
    assert rates(tmp_path)[3] == 0.5 * RATES[2] == 0.375
