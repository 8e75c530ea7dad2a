"""B04: a resume exactly at the end of an epoch goes on with the next one."""

import pytest

from tests.train.fakes import make_trainer


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_eight_rows_in_batches_of_four(tmp_path, stop):
    options = {"rows": 8, "batch_size": 4}
    whole, unbroken, _ = make_trainer(num_steps=6, **options)
    whole.train()
    assert [sorted(a + b) for a, b in zip(unbroken.rows[::2], unbroken.rows[1::2], strict=True)] == [list(range(8))] * 3
    make_trainer(tmp_path, num_steps=stop, **options)[0].train()
    trainer, backend, _ = make_trainer(tmp_path, resume_from="latest", num_steps=6, **options)
    assert trainer.train().step == 6
    assert backend.rows == unbroken.rows[stop:]
