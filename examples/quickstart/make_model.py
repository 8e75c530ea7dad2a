"""Nothing -> model/: a Qwen3 of about one million random weights, with a tokenizer trained on data/train.jsonl.

The same bytes at every call: a config, a seed, and text of this repository. Takes seconds; nothing is downloaded.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
VOCABULARY = 1024
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
WRAPPERS = [f"<{slash}{name}>" for name in ("tools", "tool_call", "tool_response") for slash in ("", "/")]


def make_tokenizer(folder: Path, *, rows: list[dict]) -> None:
    """A byte-level BPE trained on the text of the rows as the chat template renders it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (FOLDER / "chat_template.jinja").read_text()
    texts = [tokenizer.apply_chat_template(r["messages"], tools=r.get("tools"), tokenize=False) for r in rows]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS + WRAPPERS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(wrapper, special=False, normalized=False) for wrapper in WRAPPERS])
    trained = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>")
    trained.chat_template = tokenizer.chat_template
    trained.model_max_length = 512
    trained.save_pretrained(folder)


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes ``folder`` so that transformers loads it like any model, and returns it."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    train = (FOLDER / "data" / "train.jsonl").read_text()
    make_tokenizer(folder, rows=[json.loads(line) for line in train.splitlines()])
    pad, _, end = range(len(SPECIALS))
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.065,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make_model(FOLDER / "model"))
