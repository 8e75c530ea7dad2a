"""B17: after a resume, the epoch goes on where it was, and later epochs have orders of their own."""

import pytest

from burnish.data.samplers import DataMixingSampler, RandomSampler, SequentialSampler
from burnish.train.cadence import Cadence
from tests.train.fakes import make_trainer


class Rotated:
    """A sampler as users write them: each epoch begins one row later."""

    def __init__(self):
        self.epoch = self.next = 0

    def __len__(self):
        return 20

    def __iter__(self):
        for position in range(self.next, 20):
            self.next = position + 1
            yield (position + self.epoch) % 20
        self.next, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state):
        self.epoch, self.next = state["epoch"], state["next"]


SAMPLERS = {
    "random": lambda: RandomSampler(20, seed=42),
    "sequential": lambda: SequentialSampler(20),
    "custom": Rotated,
    "weighted": lambda: DataMixingSampler(range(20), lengths=[5, 15], weights=[1, 1]),
}


@pytest.mark.parametrize("stop", [3, 5, 8, 13])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_rows_of_a_resumed_run(tmp_path, kind, stop):
    def trainer(folder=None, **options):
        options = {"rows": 20, "batch_size": 4, "save_at": Cadence(1), "sampler": SAMPLERS[kind](), **options}
        return make_trainer(folder, **options)

    whole, unbroken, _ = trainer(num_steps=20)
    whole.train()
    epochs = [sum(epoch, ()) for epoch in zip(*[iter(unbroken.rows)] * 5, strict=True)]
    if kind != "weighted":
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 4
    assert len(set(epochs)) == (1 if kind == "sequential" else 4)

    trainer(tmp_path, num_steps=stop)[0].train()
    resumed, backend, _ = trainer(tmp_path, num_steps=20, resume_from="latest")
    resumed.train()
    assert backend.rows == unbroken.rows[stop:]
