"""A shape becomes a folder with a model of random weights, to measure with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from burnish.models.load import read_config, read_tokenizer

SMALL: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
"""A shape of 29 million parameters."""


def write_blank(
    folder: Path, *, shape: str | Mapping[str, Any], dtype: torch.dtype, device: str, trust_remote_code: bool = False
) -> None:
    """Write a model with random weights, the same each time, and a tokenizer that ``burnish train`` takes.

    Args:
        folder: made if it is missing.
        shape: a folder or hub id, of which only config and tokenizer are read; or a config, with its ``model_type``.
        dtype: of the weights written.
        device: where they are drawn.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: there is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if isinstance(shape, str):
        config: Any = read_config(shape, trust_remote_code=trust_remote_code)
        tokenizer = read_tokenizer(shape, trust_remote_code=trust_remote_code)
    else:
        config, tokenizer = AutoConfig.for_model(**shape), _tokenizer()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "word": 2}, unk_token="word"))
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>")
