"""A run in this process."""

from concurrent.futures import ThreadPoolExecutor

from burnish import SFTConfig, SFTTrainer
from tests.toys import chat, write_jsonl


def test_a_run_needs_no_main_thread(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat("a", "b")] * 4)
    config = SFTConfig(
        model={"path": str(model_dir)}, train_datasets=[str(rows)], num_workers=0, log_dir=str(tmp_path), num_steps=1
    )
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(SFTTrainer(config).train).result().step == 1
