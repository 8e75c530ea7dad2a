"""10 steps equal 5 + resume + 5, to the bit; a lost cursor is caught."""

import pytest
import torch

from burnish import SFTTrainer
from burnish.data.stream import BatchStream
from burnish.train.callbacks import Callback
from tests.parity.runs import config_of, read_back, run, store_data

OPTIONS = {
    "random": {"sampler": "random"},
    "readers": {"sampler": "random", "dataloader_num_workers": 2},
    "bins": {"sampler": "random", "use_sequence_packing": True, "max_tokens_per_microbatch": 200},
    "tokens": {"sampler": "random", "batch_tokens": 240},
    "schedule": {
        "sampler": "random",
        "optimizer_config": {"lr": 3e-3, "scheduler": "cosine", "num_warmup_steps": 3, "min_lr_ratio": 0.1},
    },
}


class StopAt(Callback):
    """Ends the run after a step, as a user's own rule would."""

    def __init__(self, step):
        self._step = step

    def on_step_end(self, progress, requests, *, batch, result):
        requests.stop = progress.step == self._step


def in_two(folder, *, model_dir, at, num_steps, resumed_options=None, **keys):
    """Train to ``at`` under the horizon of ``num_steps``, then to the end in a second run."""
    keys = keys | {"callbacks": [{"tests.parity.test_resume.StopAt": {"step": at}}]}
    SFTTrainer(config_of(folder, model_dir=model_dir, num_steps=num_steps, **keys)).train()
    keys = keys | (resumed_options or {}) | {"callbacks": [], "resume_from": "latest"}
    return run(folder, model_dir=model_dir, num_steps=num_steps, **keys)


def assert_same_bits(got, expected):
    assert got["losses"] == expected["losses"]
    assert got["norms"] == expected["norms"]
    for name, weight in expected["weights"].items():
        assert torch.equal(got["weights"][name], weight), name


@pytest.mark.parametrize("option", OPTIONS)
def test_ten_steps(tmp_path, model_dir, option):
    data = store_data(tmp_path)
    whole = run(tmp_path / "whole", model_dir=model_dir, num_steps=10, **data, **OPTIONS[option])
    parts = in_two(tmp_path / "parts", model_dir=model_dir, at=5, num_steps=10, **data, **OPTIONS[option])
    assert_same_bits(parts, whole)


@pytest.mark.parametrize("at", [4, 8])
def test_at_the_end_of_an_epoch_and_with_other_readers(tmp_path, model_dir, at):
    data = store_data(tmp_path) | {"sampler": "random"}
    whole = run(tmp_path / "whole", model_dir=model_dir, num_steps=10, **data)
    resumed = {"dataloader_num_workers": 1}
    parts = in_two(tmp_path / "parts", model_dir=model_dir, at=at, num_steps=10, resumed_options=resumed, **data)
    assert_same_bits(parts, whole)


def test_a_lost_row_that_waited_is_caught(tmp_path, model_dir, monkeypatch):
    data = store_data(tmp_path) | OPTIONS["tokens"]
    whole = run(tmp_path / "whole", model_dir=model_dir, num_steps=10, **data)
    resume = BatchStream.resume
    waited = []

    def lose(self, cursor):
        waited.append(cursor["held"])
        resume(self, cursor | {"held": None})

    monkeypatch.setattr(BatchStream, "resume", lose)
    parts = in_two(tmp_path / "parts", model_dir=model_dir, at=3, num_steps=10, **data)
    assert waited != [None]
    with pytest.raises(AssertionError):
        assert_same_bits(parts, whole)


def test_a_lost_cursor_is_caught(tmp_path, model_dir, monkeypatch):
    data = store_data(tmp_path) | {"sampler": "random"}
    whole = run(tmp_path / "whole", model_dir=model_dir, num_steps=10, **data)

    def forget(self, cursor):
        self._step = cursor["step"]

    monkeypatch.setattr(BatchStream, "resume", forget)
    parts = in_two(tmp_path / "parts", model_dir=model_dir, at=5, num_steps=10, **data)
    with pytest.raises(AssertionError):
        assert_same_bits(parts, whole)
    assert read_back(tmp_path / "parts", num_steps=10)["losses"][:5] == whole["losses"][:5]
