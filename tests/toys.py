"""Small real things for tests: tokenizer TK, templates T1 to T3, a two-layer model folder, stores in every format."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

T1 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
T2 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>\\n\\n') %}"
    "{% if loop.index0 > ns.last %}"
    "<think>\n{{ parts[0].split('<think>\\n')[-1].rstrip('\\n') if parts|length > 1 else '' }}\n</think>\n\n{{ parts[-1] }}"
    "{% else %}{{ parts[-1] }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
T3 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nD<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>")


def save_tokenizer(folder: Path, *, template: str = T1) -> Path:
    """TK in ``folder``: one character = one token, but for the specials and the merge of two newlines."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *(chr(c) for c in range(32, 127)), "é", "Ω", "\u2028"]
    vocab = {c: i for i, c in enumerate([*SPECIALS, *characters, "\n\n"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("\n", "\n")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def save_model(folder: Path, *, seed: int = 0, tied: bool = True, template: str = T1, vocabulary: int = 128) -> Path:
    """A two-layer Qwen3 with random weights and TK in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return save_tokenizer(folder, template=template)


def chat(*contents: str, system: str | None = None) -> dict:
    """A chat row: user and assistant take turns through ``contents``."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + turns}


def write_jsonl(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_parquet(file: Path, rows: list[dict], schema: pa.Schema | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return file


def row(ids: list[int], mask: list[int]) -> dict:
    return {"input_ids": ids, "loss_mask": mask}
