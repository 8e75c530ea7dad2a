"""The code in the docs works as it stands there."""

import json
import re

from burnish import SFTConfig, SFTTrainer
from tests.house.source import ROOT
from tests.toys import row, write_jsonl


def module_from(page, folder, name, *, defines):
    """The one Python block of a page that defines a class, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    [code] = [block for block in blocks if f"class {defines}" in block]
    (folder / f"{name}.py").write_text(code)


def test_the_sampler_and_the_callback_of_the_docs(tmp_path, model_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module_from("data.md", tmp_path, "order", defines="ShortFirst")
    module_from("training.md", tmp_path, "stop", defines="StopWhenGood")
    rows = [row(list(range(3, 3 + n)), [0] + [1] * (n - 1)) for n in (9, 2, 5, 7)]
    store = str(write_jsonl(tmp_path / "store.jsonl", rows))
    config = SFTConfig(
        model={"path": str(model_dir)},
        pretokenized_dataset_paths=[store],
        eval_pretokenized_dataset_paths=[store],
        eval_dataset_names=["heldout"],
        eval_interval=6,
        sampler="custom",
        sampler_class_path="order.ShortFirst",
        callbacks=[{"stop.StopWhenGood": {"loss": 100.0}}],
        batch_size=1,
        num_steps=100,
        log_dir=str(tmp_path / "runs"),
    )
    assert SFTTrainer(config).train().step == 6, "the callback stops at the first evaluation"
    lines = (tmp_path / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/num_tokens"] for line in lines] == [2, 5, 7, 9, 9, 2]
