"""The script that compares Megatron with FSDP on a GPU, on a CPU with a shape of two narrow layers."""

import re

import pytest

from benchmarks import gpu_megatron
from benchmarks.gpu_megatron import Side, main, parity, sides

TINY = ["device=cpu", "shapes=tiny", "length=64", "steps=1"]


def test_both_sides_train_alike_and_are_measured(capsys):
    main(TINY)
    said = capsys.readouterr().out
    costs, numbers = re.split(r"\n\n(?=\| loss, gradient norm)", said)
    assert costs.startswith("\ntiny\n\n| | tokens/s")
    names = [side.name for side in sides("cpu")]
    for table in (costs, numbers):
        assert [line.split("|")[1].strip() for line in table.strip().splitlines()[-len(names) :]] == names
    rows = [line.strip("| ").split(" | ") for line in numbers.strip().splitlines()[2:]]
    assert [len(row) for row in rows] == [1 + 3 + 2] * 3
    assert all(float(share) < 0.02 for row in rows for share in row[-2:])
    assert len({row[1] for row in rows}) > 1, "bfloat16 is not float32"


def test_how_far_a_side_is_off():
    table = parity({"exact": [[2.0, 1.0], [4.0, 2.0]], "other": [[2.0, 1.5], [3.0, 2.0]]})
    assert table.splitlines()[2:] == [
        "| exact | 2.00000, 1.0000 | 4.00000, 2.0000 | 0.0e+00 | 0.0e+00 |",
        "| other | 2.00000, 1.5000 | 3.00000, 2.0000 | 2.5e-01 | 5.0e-01 |",
    ]


def test_a_side_that_fails_says_why(monkeypatch, capsys):
    monkeypatch.setattr(gpu_megatron, "sides", lambda _: [Side("megatron", {"strategy": "megatron"})])
    with pytest.raises(SystemExit):
        main(TINY)
    assert "needs a GPU, and there is none" in capsys.readouterr().out
