"""Starting costs nothing: no torch until it is needed."""

import subprocess
import sys
import time

_LIGHT = (
    "import burnish",
    "import burnish.config",
    "from burnish.cli.main import main; main(['train', '--help'])",
    "from burnish.cli.main import main; main(['train', 'num_step=5'])",
    "import burnish.storage, burnish.data.packing, burnish.data.batch",
)


def _run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _seconds(code: str) -> float:
    start = time.perf_counter()
    _run(code)
    return time.perf_counter() - start


def test_import_takes_less_than_three_tenths_of_a_second():
    bare = min(_seconds("pass") for _ in range(5))
    ours = min(_seconds("import burnish") for _ in range(5))
    assert ours - bare < 0.3


def test_no_torch_before_it_is_needed():
    heavy = "{'torch', 'transformers', 'datasets', 'ray', 'megatron'}"
    for code in _LIGHT:
        shown = _run(f"{code}\nimport sys; print(sorted({heavy} & set(sys.modules)))")
        assert shown.splitlines()[-1] == "[]", code


def test_the_public_names_are_there():
    names = "DataMixingSampler, SFTConfig, SFTTrainer, TrainOnWhat, load_from_pretokenized"
    assert _run(f"from burnish import {names}; print('ok')") == "ok\n"
