"""Teaches SmolLM2-135M-Instruct to talk like a pirate on a CPU, and asks it the same questions before and after."""

import os
import sys
from pathlib import Path

import torch
from convert import require_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from burnish import SFTTrainer
from burnish.config import load_config

ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is the capital of Italy?", "Which colour does the sea have?", "What is a guitar?")


def answers(folder: Path) -> list[str]:
    """What the model in ``folder`` says to each question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        said.append(tokenizer.decode(ids, skip_special_tokens=True))
    return said


def fast_dtype() -> str:
    """What this CPU multiplies fastest in."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def main() -> None:
    os.chdir(ROOT)
    transformers_logging.disable_progress_bar()
    before = answers(require_model())
    config = load_config(Path("examples/smollm2/smollm2.yaml"), [f"model.dtype={fast_dtype()}", *sys.argv[1:]])
    progress = SFTTrainer(config).train()
    export = Path(config.export_path) / f"global_step_{progress.step}"
    if not export.exists():
        raise SystemExit(f"stopped after step {progress.step}, before the export")
    after = answers(export)
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        print(f"\n{question}\n  before: {old!r}\n  after:  {new!r}")
    print(f"\nmodel: {export}\nmetrics and config: {Path(config.log_dir) / config.run_name}")


if __name__ == "__main__":
    main()
