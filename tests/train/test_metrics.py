from dataclasses import replace

import numpy as np

from burnish.backends.base import StepResult
from burnish.data.example import Images
from burnish.train.metrics import StepMetrics
from burnish.train.progress import Progress
from tests.backends.steps import batch_of, example

RESULT = StepResult((6.0,), (3,), 1.0, 1e-3, False, {}, 0.0)


def flops(lengths, patches, num_targets):
    return 100.0 * sum(lengths) + 1000.0 * sum(patch**2 for patch in patches) + num_targets


def mfu(*rows, num_ranks, data_size):
    made = StepMetrics(["list"], 8, num_ranks, data_size, flops, 10.0)
    batch = batch_of([example([3, 4, 5], [0, 1, 1]), example([6, 7], [0, 1]), *rows])
    batch = replace(batch, cursor={"epoch": 0, "position": 2})
    return made.of(Progress(), batch=batch, result=RESULT, timings={"step": 2.0})["train/mfu"]


def test_utilisation_counts_every_device_that_shares_the_rows():
    assert mfu(num_ranks=4, data_size=4) == 503 / (2.0 * 10.0)
    assert mfu(num_ranks=4, data_size=2) == 503 / (2.0 * 10.0 * 2)


def test_utilisation_counts_each_image_by_itself():
    seen = replace(example([8, 9], [0, 0]), images=Images(np.zeros((8, 3)), np.array([[1, 2, 2], [2, 1, 2]])))
    assert mfu(seen, num_ranks=1, data_size=1) == (703 + 1000 * (4**2 + 4**2)) / (2.0 * 10.0)
