"""The rows of a step are those that the run drew, known from its config alone."""

import json
import time
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish import SFTConfig, SFTTrainer
from burnish.cli.main import main
from burnish.data.samplers import DataMixingSampler, RandomSampler, SequentialSampler
from burnish.data.stream import BatchStream
from burnish.errors import CheckpointError, DataError
from burnish.inspect.step import trace_step
from burnish.train.callbacks import Callback
from tests.toys import chat, row, write_jsonl

DRAWN = []
SIZES = (7, 4)
KINDS = {
    "random": {},
    "sequential": {"sampler": "sequential"},
    "mixture": {"train_dataset_weights": [1, 5]},
    "custom": {
        "sampler": "custom",
        "sampler_class_path": "examples.curriculum.order.ShortFirst",
        "sampler_kwargs": {"groups": 3},
    },
    "batch_tokens": {"batch_tokens": 130},
}


class Note(Callback):
    """Notes what is drawn; asks to stop after ``last`` steps."""

    def __init__(self, last=99):
        self._last = last

    def on_step_end(self, progress, requests, *, batch, result):
        DRAWN.append(batch.row_numbers)
        requests.stop = progress.step == self._last


@pytest.fixture
def config_of(tmp_path, model_dir):
    """Two files of chats, the first row of each unusable; eight steps."""
    files = [tmp_path / f"{size}.jsonl" for size in SIZES]
    for size, file in zip(SIZES, files, strict=True):
        rows = [chat("dropped", "")] + [chat("q" * number, f"of {size}") for number in range(1, size + 1)]
        write_jsonl(file, rows)

    def make(last=99, **keys):
        base = {"model": {"path": str(model_dir)}, "train_datasets": list(map(str, files)), "num_workers": 0}
        base |= {"num_steps": 8, "log_dir": str(tmp_path / "runs")}
        base |= {"callbacks": [{"tests.inspect.test_step.Note": {"last": last}}]}
        base |= {} if "batch_tokens" in keys else {"batch_size": 3}
        return SFTConfig(**base | keys)

    DRAWN.clear()
    return make


def traced(config, steps=range(1, 9)):
    return [tuple(row.row for row in trace_step(config, step).rows) for step in steps]


def trained(config):
    """The rows of each step that a run draws."""
    start = len(DRAWN)
    SFTTrainer(config).train()
    return DRAWN[start:]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_run_into_later_epochs(config_of, kind):
    config = config_of(**KINDS[kind])
    assert traced(config) == trained(config)
    assert trace_step(config, 1).epoch == 0
    assert trace_step(config, 8).epoch == (2 if kind == "batch_tokens" else 1)


@pytest.mark.parametrize("kind", ["mixture", "batch_tokens"])
def test_rows_are_those_of_a_resumed_run(config_of, tmp_path, kind):
    keys = {"ckpt_path": str(tmp_path / "ckpt"), "resume_from": "latest", **KINDS[kind]}
    drawn = [*trained(config_of(last=3, **keys)), *trained(config_of(**keys))]
    assert traced(config_of(**keys)) == drawn == traced(config_of(**KINDS[kind]))


@pytest.mark.parametrize("sampler", ["random", "sequential"])
def test_a_run_resumed_with_another_batch_size_is_followed_from_where_that_began(config_of, tmp_path, sampler):
    keys = {"ckpt_path": str(tmp_path / "ckpt"), "sampler": sampler}
    trained(config_of(last=2, **keys))
    other = {**keys, "batch_size": 5, "resume_from": "latest"}
    with pytest.raises(CheckpointError, match="batch_size was 3, is 5"):
        trace_step(config_of(**other), 4)
    other["resume_allow_changes"] = True
    assert traced(config_of(**other), range(3, 9)) == trained(config_of(**other))
    assert traced(config_of(**keys), range(1, 3)) == DRAWN[:2]


def test_a_row_stands_where_it_came_from_and_where_it_goes(config_of, tmp_path):
    config = config_of(sampler="sequential", placement={"num_gpus_per_node": 2}, batch_size=8)
    trace = trace_step(config, 1)
    assert [row.place for row in trace.rows] == [
        *(f"{tmp_path / '7.jsonl'}, line {line}" for line in range(2, 9)),
        f"{tmp_path / '4.jsonl'}, line 2",
    ]
    assert [row.source for row in trace.rows] == [str(tmp_path / "7.jsonl")] * 7 + [str(tmp_path / "4.jsonl")]
    frame = len("<user\n>\n<assistant\n>\n")  # a special token counts as one character
    assert [row.tokens for row in trace.rows] == [frame + number + len("of 7") for number in (*range(1, 8), 1)]
    assert {row.targets for row in trace.rows} == {len("of 7>")}
    places = [(row.rank, row.micro_batch, row.micro_batch_row) for row in trace.rows]
    assert sorted(places) == sorted([(rank, number, 0) for rank in (0, 1) for number in (0, 1)] * 2)


def test_the_rows_of_a_store_stand_in_it(tmp_path, model_dir):
    file = write_jsonl(tmp_path / "store.jsonl", [row([4, 5], [0, 1]), row([4, 6, 7], [0, 1, 1])])
    config = SFTConfig(model={"path": str(model_dir)}, pretokenized_dataset_paths=[str(file)], batch_size=2)
    assert {(found.place, found.tokens, found.targets) for found in trace_step(config, 1).rows} == {
        (f"{file}, row 0", 2, 1),
        (f"{file}, row 1", 3, 2),
    }


@pytest.mark.parametrize("step", [0, 9])
def test_no_such_step(config_of, step):
    with pytest.raises(DataError, match=f"step {step}: is not one of the 8 steps of the run"):
        trace_step(config_of(), step)


def test_the_command_says_it_in_words_and_in_json(config_of, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(config_of(sampler="sequential").to_yaml())
    assert main(["inspect", "step", "4", str(tmp_path / "run.yaml"), "batch_size=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["num_steps"], [row["row"] for row in found["rows"]]) == (4, 8, [6, 7])
    assert main(["inspect", "step", "4", str(tmp_path / "run.yaml")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "step 4 of 8, epoch 0: 2 rows, 57 tokens, 10 targets"
    assert rows[0].startswith(f"row 9: {tmp_path / '4.jsonl'}, line 4, 28 tokens, 5 targets; rank 0, micro-batch 0")


@given(
    shares=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    drawn=st.integers(0, 1500),
    lengths=st.lists(st.integers(1, 30), min_size=6, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_a_mixture_is_sought_to_where_drawing_leads(shares, drawn, lengths):
    lengths = lengths[: len(shares)]
    walked, sought = (DataMixingSampler(range(sum(lengths)), lengths=lengths, weights=shares) for _ in range(2))
    while left := drawn - sum(walked.state_dict()["counts"]):
        list(islice(iter(walked), left))
    sought.seek(drawn)
    assert sought.state_dict() == walked.state_dict()


SIZE = 10**9


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(SIZE, seed=1),
        SequentialSampler(SIZE),
        DataMixingSampler(range(SIZE), lengths=[SIZE - 10, 10], weights=[0.9990, 0.0010]),
    ],
    ids=["random", "sequential", "mixture"],
)
def test_a_late_step_of_a_billion_rows_is_sought_in_no_time(sampler):
    stream = BatchStream(SimpleNamespace(store=range(SIZE)), sampler=sampler, batch_size=512)
    started = time.process_time()
    stream.seek(1_000_000 - 1)
    draw = next(stream.draws())
    assert time.process_time() - started < 0.05
    assert (draw.step, len(draw.rows), draw.cursor["position"]) == (1_000_000, 512, 512_000_000)
