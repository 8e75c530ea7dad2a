"""A backend that counts, a store in memory, and a trainer over both: the loop without a network."""

import json
from pathlib import Path

import numpy as np

from burnish.backends.base import StepResult
from burnish.backends.comm import alone
from burnish.data.example import Example
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, plan_micro_batches
from burnish.data.samplers import RandomSampler
from burnish.data.stream import BatchBuilder, BatchStream, EvalBatches
from burnish.train.cadence import NEVER, Cadence
from burnish.train.callbacks import Callbacks
from burnish.train.checkpoint import Checkpointer
from burnish.train.metrics import StepMetrics
from burnish.train.profiling import Profiler
from burnish.train.progress import Progress
from burnish.train.trackers import Trackers
from burnish.train.trainer import Trainer


class ListStore:
    """Examples in memory."""

    def __init__(self, examples, name="list"):
        self._examples = examples
        self.name = name
        self.fingerprint = f"list-{len(examples)}"
        self.lengths = np.array([len(e.input_ids) for e in examples])
        self.target_counts = np.array([int(e.loss_mask[1:].sum()) for e in examples])
        self.num_patches = np.zeros(len(examples), np.int64)

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        return self._examples[index]

    def locate(self, index):
        return f"list, row {index}"


def make_store(num_rows=37, *, seed=0, longest=20, name="list"):
    """Row r holds the ids 1000 * (r + 1), + 1, ...; every row has a target."""
    rng = np.random.default_rng(seed)
    examples = []
    for r in range(num_rows):
        size = int(rng.integers(2, longest + 1))
        mask = rng.integers(0, 2, size).astype(np.uint8)
        mask[-1] = 1
        examples.append(Example(np.arange(size, dtype=np.int32) + 1000 * (r + 1), mask))
    return ListStore(examples, name=name)


class CountingBackend:
    """Its only weight is the number of steps; the loss of a step is 10 / step, an evaluation's is 2 a target."""

    layout = Layout()

    def __init__(self, bad_steps=()):
        self.weight = 0
        self.rows = []
        self.exports = []
        self._bad_steps = bad_steps

    def train_step(self, batch):
        skipped = batch.step in self._bad_steps
        self.weight += not skipped
        self.rows.append(batch.row_numbers)
        loss = float("nan") if skipped else batch.num_targets * 10 / batch.step
        return StepResult((loss,), (batch.num_targets,), 1.0, 1e-3, skipped, {"optimizer": 0.0}, 0.5)

    def eval_loss(self, batch):
        return 2.0 * batch.num_targets, batch.num_targets

    def generate(self, prompts, *, max_new_tokens):
        """Each prompt again, and the weight."""
        return [[*prompt, self.weight][-max_new_tokens:] for prompt in prompts]

    save_bytes = 1

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "weight.json").write_text(json.dumps(self.weight))
        return Saved()

    def load(self, folder, *, weights_only=False):
        self.weight = json.loads((folder / "weight.json").read_text())

    def export(self, folder):
        self.exports.append(folder.name)

    def close(self):
        pass


class Saved:
    done = True

    def wait(self):
        pass


class Recorder:
    """A tracker that remembers."""

    def __init__(self):
        self.lines = []
        self.answers = []
        self.failed = None

    def log(self, metrics, *, step):
        self.lines.append((step, dict(metrics)))

    def log_answers(self, answers, *, step):
        self.answers.append((step, list(answers)))

    def close(self, *, failed):
        self.failed = failed

    def steps_with(self, key):
        return [step for step, metrics in self.lines if key in metrics]


def make_stream(store, *, seed=7, layout=None, sampler=None, micro_batch_size=2, **options):
    """``options`` are those of the stream; the batch size is 4."""
    layout = layout or Layout()
    mixture = Mixture([store])

    def planner(lengths, _):
        return plan_micro_batches(lengths, micro_batch_size=micro_batch_size, share_row=True, layout=layout)

    builder = BatchBuilder(mixture, planner=planner, layout=layout, pad_id=0)
    sampler = RandomSampler(len(mixture), seed=seed) if sampler is None else sampler
    return BatchStream(builder, sampler=sampler, **{"batch_size": 4, **options})


def make_trainer(tmp_path: Path | None = None, *, resume_from="", backend=None, **options):
    """(trainer, backend, recorder); ``options`` replace parts of the trainer or are listed below."""
    backend = backend or CountingBackend()
    recorder = Recorder()
    rows = options.pop("rows", 37)
    of_stream = {key: options.pop(key) for key in ("batch_size", "batch_tokens", "sampler") if key in options}
    stream = make_stream(make_store(rows), **of_stream)
    eval_store = make_store(5, seed=1, name="held")
    place = options.pop("ckpt_path", str(tmp_path / "ckpt") if tmp_path else "")
    ranks = options.pop("ranks", None) or alone()
    checkpointer = Checkpointer(place, ranks=ranks, keep=options.pop("keep", -1), run=options.pop("run", {}), config={})
    if place:
        checkpointer.recover(resume_from)
    callbacks = Callbacks(options.pop("callbacks", ()))
    progress = Progress()
    if checkpoint := checkpointer.find(resume_from):
        state = checkpointer.read(checkpoint, allow_changes=False)
        backend.load(checkpoint / "backend")
        stream.resume(state["cursor"])
        callbacks.load_state_dicts(state["callbacks"])
        progress = Progress(**state["progress"])
    builder = BatchBuilder(
        Mixture([eval_store]),
        planner=lambda lengths, _: plan_micro_batches(lengths, micro_batch_size=2, share_row=True, layout=Layout()),
        layout=Layout(),
        pad_id=0,
    )
    parts = {
        "num_steps": 10,
        "eval_sets": {"held": EvalBatches(builder, batch_size=2)},
        "eval_at": NEVER,
        "eval_first": False,
        "save_at": Cadence(0),
        "exporter": None,
        "questions": None,
        "profiler": Profiler(),
        "max_bad_steps": 3,
    }
    metrics = StepMetrics(["list"], stream.draws_per_epoch, 1, 1, lambda lengths, targets: 1.0, None)
    trainer = Trainer(
        ranks=ranks,
        backend=backend,
        stream=stream,
        checkpointer=checkpointer,
        metrics=metrics,
        trackers=Trackers([recorder], identity="a run"),
        callbacks=callbacks,
        progress=progress,
        **(parts | options),
    )
    return trainer, backend, recorder
