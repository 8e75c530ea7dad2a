"""Megatron Core beside FSDP, on one GPU: `python -m benchmarks.gpu_megatron [shapes=0.5B,1.5B] [steps=10] [length=4096]`.

Each side trains the same weights (Qwen2.5's shapes, random) on the same rows (lognormal lengths, mean 600, packed into
`length` tokens), in bfloat16 with float32 masters and in a process of its own. Megatron's layers are torch's, and where
Transformer Engine can be imported a further side has those. For each shape it prints two tables: what a step costs; and
losses and gradient norms of the first steps, with FSDP in float32 to judge the differences by. A side that fails says
why, the others go on. `device=cpu shapes=tiny length=256` tries it out without a GPU, on the stand-in for tests.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu import SHAPES
from burnish.bench.measure import BUILT_IN, BenchReport, BenchSettings, bench
from burnish.config import SFTConfig
from burnish.errors import BurnishError
from burnish.models.blank import SMALL
from burnish.train.callbacks import Callback

TINY = SMALL | {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}
ENGINE = "transformer_engine"
COMPARED = 5
"""Steps whose losses and gradient norms are compared."""


class Numbers(Callback):
    """Writes losses and gradient norms of the first steps to ``out``; the module ``hidden`` cannot be imported."""

    def __init__(self, out, hidden=""):
        self._out, self._seen = Path(out), []
        if hidden:
            assert hidden not in sys.modules, f"{hidden} is imported already"
            sys.modules[hidden] = None

    def on_log(self, progress, requests, *, metrics):
        self._seen.append((metrics["train/loss"], metrics["train/grad_norm"]))

    def on_train_end(self, progress, requests):
        self._out.write_text(json.dumps(self._seen[:COMPARED]))


@dataclass(frozen=True)
class Side:
    """Who is measured."""

    name: str
    keys: Mapping[str, Any]
    """Of its config."""
    dtype: str = "bfloat16"
    hidden: str = ""
    """Module that its process must not find."""


def sides(device: str) -> list[Side]:
    fsdp = {"fsdp_config": {"reshard_after_forward": False}}
    megatron = {"strategy": "megatron", "megatron_config": {"cpu": device == "cpu"}}
    found = [
        Side("fsdp, float32", fsdp, dtype="float32"),
        Side("fsdp", fsdp),
        Side("megatron, torch's layers", megatron, hidden=ENGINE),
    ]
    # As the backend asks, but in another process: what it imports must not stay in this one.
    asked = [sys.executable, "-c", f"import {ENGINE}.pytorch"]
    if device == "cuda" and subprocess.run(asked, capture_output=True, check=False).returncode == 0:
        found.append(Side("megatron, Transformer Engine's", megatron))
    return found


def measure(side: Side, settings: BenchSettings, *, length: int) -> tuple[BenchReport, list[list[float]]]:
    """What its steps cost, and (loss, gradient norm) of the first ones."""
    with TemporaryDirectory(prefix="burnish-bench-") as folder:
        out = Path(folder) / "numbers.json"
        config = SFTConfig(
            model={"path": BUILT_IN, "dtype": side.dtype},
            max_length=length,
            use_sequence_packing=True,
            batch_tokens=8 * length,
            callbacks=[{"benchmarks.gpu_megatron.Numbers": {"out": str(out), "hidden": side.hidden}}],
            **side.keys,
        )
        return bench(config, settings), json.loads(out.read_text())


def parity(numbers: Mapping[str, list[list[float]]]) -> str:
    """A table in Markdown; the last columns are by how much a side is off the first at most, by the first's number."""
    first, *_ = numbers.values()
    steps = range(1, len(first) + 1)
    lines = [
        f"| loss, gradient norm | {' | '.join(f'step {step}' for step in steps)} | loss off | norm off |",
        f"|---|{'---|' * len(first)}---|---|",
    ]
    for name, found in numbers.items():
        off = [
            max(abs(own[kind] / exact[kind] - 1) for own, exact in zip(found, first, strict=True)) for kind in (0, 1)
        ]
        cells = [*(f"{loss:.5f}, {norm:.4f}" for loss, norm in found), *(f"{share:.1e}" for share in off)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(shape: Mapping[str, Any], *, steps: int, length: int, device: str) -> bool:
    """Print the tables of a shape; whether all sides could be measured."""
    settings = BenchSettings(shape=shape, mean=min(600, length // 4), steps=steps)
    costs, numbers, failures = [], {}, []
    for side in sides(device):
        try:
            report, numbers[side.name] = measure(side, settings, length=length)
        except BurnishError as error:
            failures.append(f"{side.name}: {error}")
            continue
        *head, row = report.to_text().splitlines()
        costs += [*([] if costs else head), row.replace("Burnish", side.name)]
    tables = ["\n".join(costs), parity(numbers)] if numbers else []
    print(*tables, *failures, sep="\n\n", flush=True)
    return not failures


def main(arguments: list[str]) -> None:
    given = {"shapes": "0.5B,1.5B", "steps": "10", "length": "4096", "device": "cuda"}
    given |= dict(argument.split("=", 1) for argument in arguments)
    sizes = {"steps": int(given["steps"]), "length": int(given["length"])}
    complete = True
    for name in given["shapes"].split(","):
        print(f"\n{name}\n", flush=True)
        complete &= compare({"tiny": TINY, **SHAPES}[name], **sizes, device=given["device"])
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
