from dataclasses import replace

from burnish.backends.base import StepResult
from burnish.train.metrics import StepMetrics
from burnish.train.progress import Progress
from tests.backends.steps import batch_of, example

RESULT = StepResult((6.0,), (3,), 1.0, 1e-3, False, {}, 0.0)


def mfu(*, num_ranks, data_size):
    made = StepMetrics(["list"], 8, num_ranks, data_size, lambda lengths, targets: 100.0 * sum(lengths) + targets, 10.0)
    batch = batch_of([example([3, 4, 5], [0, 1, 1]), example([6, 7], [0, 1])])
    batch = replace(batch, cursor={"epoch": 0, "position": 2})
    return made.of(Progress(), batch=batch, result=RESULT, timings={"step": 2.0})["train/mfu"]


def test_utilisation_counts_every_device_that_shares_the_rows():
    assert mfu(num_ranks=4, data_size=4) == 503 / (2.0 * 10.0)
    assert mfu(num_ranks=4, data_size=2) == 503 / (2.0 * 10.0 * 2)
