"""One GPU: `python -m benchmarks.gpu [shapes=0.5B,1.5B,7B] [steps=10] [compare=trl]`; a few minutes.

Models of Qwen2.5's shapes with random weights, in bfloat16 with float32 masters, on rows of lognormal length (mean 600)
packed into 4096 tokens. TRL is measured beside the two smaller ones: with its own memory the largest would not fit. What
it prints are the rows of a table; `PYTHONPATH` needs nothing but Burnish, and TRL for the comparison.
"""

import sys
from collections.abc import Mapping
from typing import Any

from burnish.bench.measure import BUILT_IN, BenchSettings, bench
from burnish.config import SFTConfig
from burnish.models.blank import SMALL

_QWEN = SMALL | {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2}
SHAPES: dict[str, Mapping[str, Any]] = {
    "0.5B": _QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "head_dim": 64,
    },
    "1.5B": _QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "head_dim": 128,
    },
    "7B": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
RECOMPUTED = ("7B",)
"""Shapes whose layers are computed again in the backward, to fit beside 122 GB of masters, gradients and moments."""
LENGTH = 4096


def measure(name: str, settings: BenchSettings) -> str:
    """The table of a shape."""
    config = SFTConfig(
        model={"path": BUILT_IN},
        max_length=LENGTH,
        use_sequence_packing=True,
        batch_tokens=8 * LENGTH,
        fsdp_config={"activation_checkpointing": name in RECOMPUTED, "reshard_after_forward": False},
    )
    return bench(config, settings).to_text()


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    for name in given.get("shapes", ",".join(SHAPES)).split(","):
        compare = "" if name in RECOMPUTED else given.get("compare", "")
        settings = BenchSettings(shape=SHAPES[name], mean=600, steps=int(given.get("steps", 10)), compare=compare)
        print(f"\n{name}\n\n{measure(name, settings)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
