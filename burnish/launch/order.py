"""What the process of a rank is told: two files in a folder, which also takes its result."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from burnish.config import Purpose, SFTConfig

ORDER, CONFIG, OUTCOME = "order.json", "config.yaml", "outcome.json"
_ENTRY = (
    "import json, os, sys; order = json.loads(open(sys.argv[1], 'rb').read()); sys.path[:] = order['path'];"
    " os.environ.update(order['environment']); from burnish.launch.spawned import main; main()"
)
"""Modules are found where the process that launches finds them."""


def write_order(
    folder: Path, config: SFTConfig, *, purpose: Purpose, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Write to ``folder`` what ranks need; the arguments of Python for each of them, whose place is in its environment.

    Args:
        folder: seen by the ranks of this machine; rank 0 leaves ``OUTCOME`` there.
        config: what they do.
        purpose: training or evaluation.
        environment: variables for all of them.
    """
    (folder / CONFIG).write_text(config.to_yaml(), encoding="utf-8")
    told = {"purpose": purpose, "launcher": os.getpid(), "path": sys.path, "environment": dict(environment)}
    (folder / ORDER).write_text(json.dumps(told), encoding="utf-8")
    return ("-P", "-c", _ENTRY, str(folder / ORDER))
