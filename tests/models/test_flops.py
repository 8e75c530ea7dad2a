from dataclasses import replace

import numpy as np
import pytest

from burnish.errors import ConfigError
from burnish.models.flops import MEMORY_GIB, PEAK_FLOPS, Device, peak_flops, segment_flops, step_flops
from burnish.models.load import read_card


def test_parts_of_a_step(model_dir):
    card = read_card(str(model_dir))
    # 6 a weight and token; 6 a weight of the head and target; 12 a pair, head dimension, head and layer.
    expected = 6 * 18432 * 30 + 6 * 32 * 128 * 5 + 12 * 4 * 8 * 2 * (10 * 11 / 2 + 20 * 21 / 2)
    assert step_flops(card, lengths=[10, 20], num_targets=5) == expected


def test_attention_is_of_each_segment(model_dir):
    card = read_card(str(model_dir))
    one, two = (step_flops(card, lengths=lengths, num_targets=0) for lengths in ([40], [20, 20]))
    assert one - two == 12 * 4 * 8 * 2 * (40 * 41 - 2 * 20 * 21) / 2


def test_a_window_bounds_attention(model_dir):
    card = read_card(str(model_dir))
    narrow = replace(card, windows=(8, 8))
    pairs = sum(min(i, 8) for i in range(1, 1001))
    saved = step_flops(card, lengths=[1000], num_targets=0) - step_flops(narrow, lengths=[1000], num_targets=0)
    assert saved == pytest.approx(12 * 4 * 8 * 2 * (1000 * 1001 / 2 - pairs), rel=1e-12)


def test_segments_cost_what_a_step_of_them_does(model_dir):
    card = replace(read_card(str(model_dir)), windows=(8, None))
    costs = segment_flops(np.array([10, 20, 3]), card=card)
    assert costs.tolist() == [step_flops(card, lengths=[length], num_targets=0) for length in (10, 20, 3)]
    assert costs.sum() == step_flops(card, lengths=[10, 20, 3], num_targets=0)
    assert costs[1] > 2 * costs[0]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_peak_of_known_devices(name, teraflops):
    assert peak_flops(name) == teraflops * 1e12


def test_peak_of_an_unknown_device():
    assert peak_flops("Some CPU") is None


@pytest.mark.parametrize(
    ("name", "memory", "teraflops"),
    [
        ("h100-80g", 80, 989),
        ("H100", 80, 989),
        ("h100-pcie", 80, 756),
        ("h200", 141, 989),
        ("a100-40gb", 40, 312),
        ("a100", 80, 312),
        ("rtx-4090", 24, 165),
        ("l40s-48g", 48, 362),
    ],
)
def test_devices_by_name(name, memory, teraflops):
    assert Device.named(name) == Device(name, memory, teraflops * 1e12)


def test_every_device_has_its_memory():
    assert MEMORY_GIB.keys() == PEAK_FLOPS.keys()


@pytest.mark.parametrize("name", ["h101", "h100-80", "h100-g", "-80g", "NVIDIA H100"])
def test_an_unknown_device_is_told_those_that_are_known(name):
    with pytest.raises(ConfigError, match="is no device that is known") as error:
        Device.named(name)
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("device", name)
    assert "h100-pcie, h100-nvl, h100," in problem.fix
    assert problem.fix.endswith("as in a100-40g")


def test_operations_of_a_large_run_do_not_overflow(model_dir):
    card = replace(read_card(str(model_dir)), num_matmul_parameters=70 * 10**9)
    billion = step_flops(card, lengths=np.full(1_000, 1_000_000, np.int32), num_targets=0)
    assert billion > 6 * 70e9 * 1e9
