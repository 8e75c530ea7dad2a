"""Each kernel for a GPU beside one call a segment, and a step there beside the same step on a CPU."""

import numpy as np
import pytest
import torch

from burnish.models.attention import Segments, segment_attention
from burnish.models.kernels import Demand, Kernel, choose_kernel
from tests.backends.steps import batch_of, draw, opened
from tests.models.families import tiny
from tests.toys import save_tokenizer

pytestmark = pytest.mark.gpu
LENGTHS = [(700, 3, 190, 131), (1024,), (1, 1023)]
IDS = np.stack([np.repeat(np.arange(1, len(row) + 1, dtype=np.int32), row) for row in LENGTHS])


def attend(kernel, dtype, **asked):
    """(output, gradients of query, key and value) on rows of several segments."""
    random = torch.Generator("cuda").manual_seed(0)
    size = {"device": "cuda", "dtype": dtype, "generator": random, "requires_grad": True}
    q, k, v = (torch.randn(3, heads, 1024, 64, **size) for heads in (8, 2, 2))
    output, _ = segment_attention(torch.nn.Identity(), q, k, v, None, segments=Segments.of(IDS), kernel=kernel, **asked)
    weights = torch.randn(output.shape, device="cuda", dtype=dtype, generator=random)
    return output, *torch.autograd.grad((output * weights).sum(), (q, k, v))


@pytest.mark.parametrize("asked", [{}, {"scaling": 0.2}, {"sliding_window": 100}], ids=str)
@pytest.mark.parametrize(
    ("kernel", "dtype", "error"),
    [(Kernel.FLASH, torch.bfloat16, 2e-2), (Kernel.FLEX, torch.bfloat16, 2e-2), (Kernel.FLEX, torch.float32, 1e-4)],
)
def test_a_kernel_equals_one_call_a_segment(kernel, dtype, error, asked):
    for got, expected in zip(attend(kernel, dtype, **asked), attend(Kernel.SDPA, dtype, **asked), strict=True):
        assert (got - expected).norm() <= error * expected.norm()


def test_flex_bounds_scores():
    asked = {"softcap": 0.7, "sliding_window": 300}
    for got, expected in zip(
        attend(Kernel.FLEX, torch.float32, **asked), attend(Kernel.SDPA, torch.float32, **asked), strict=True
    ):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_flash_is_the_choice_here():
    demand = Demand.of(tiny("qwen3").config, device_type="cuda", dtype=torch.bfloat16)
    assert choose_kernel("auto", demand) is Kernel.FLASH


@pytest.mark.parametrize(
    "settings", [{}, {"attention": "flex"}, {"attention": "sdpa"}, {"compile_layers": True}], ids=str
)
def test_steps_equal_those_of_a_cpu(tmp_path, settings):
    tiny("qwen3").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    losses = {}
    for device, own in (("cpu", {}), ("cuda", settings)):
        settings = {"num_steps": 4, "num_sources": 2, "learning_rate": 1e-3, "dtype": "float32", **own}
        with opened(tmp_path, device=device, **settings) as backend:
            losses[device] = [backend.train_step(batch_of(draw(seed), step=seed + 1)).loss for seed in range(4)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
