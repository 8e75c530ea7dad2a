"""Asks the model of examples/smollm2 a question, with the adapter that examples/lora/lora.yaml has trained and without."""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "runs" / "lora" / "export" / "global_step_32" / "adapter"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ADAPTER.parent)
    base = AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "smollm2" / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, ADAPTER)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": " ".join(sys.argv[1:]) or "What is a guitar?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )

    def answer() -> str:
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        return tokenizer.decode(ids, skip_special_tokens=True)

    with model.disable_adapter():
        print(f"without: {answer()!r}")
    print(f"with:    {answer()!r}")


if __name__ == "__main__":
    main()
