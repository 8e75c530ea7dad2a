"""What is wrong with a run is known before it begins, all of it at once."""

from dataclasses import replace

import pytest

from burnish.config import SFTConfig
from burnish.inspect.plan import check
from burnish.models.flops import Device
from tests.toys import chat, row, write_jsonl


@pytest.fixture
def config(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat("question", "answer")] * 5)
    return lambda **values: SFTConfig(
        **({"model": {"path": str(model_dir)}, "train_datasets": [str(rows)], "num_workers": 0} | values)
    )


def test_a_sampler_and_a_checkpoint_that_are_not_there(config, tmp_path):
    missing = str(tmp_path / "global_step_3")
    report = check(config(sampler="custom", sampler_class_path="no.Such", resume_from=missing))
    assert [(p.key, p.value) for p in report.problems] == [
        ("resume_from", missing),
        ("sampler_class_path", "no.Such"),
    ]


def test_a_place_for_checkpoints_that_is_none_is_named_by_its_key(config, tmp_path):
    (tmp_path / "file").touch()
    (problem,) = check(config(num_steps=2, ckpt_path=str(tmp_path / "file" / "x"))).problems
    assert (problem.key, problem.value) == ("ckpt_path", str(tmp_path / "file" / "x"))


def test_a_callback_and_a_file_that_are_not_there(config):
    report = check(config(callbacks=["no.Such"], eval_datasets=["/no/rows.jsonl"]))
    assert [(p.key, p.value) for p in report.problems] == [("callbacks", "no.Such"), ("eval data", "/no/rows.jsonl")]
    assert "fix" not in report.problems[1].message


def test_a_model_that_is_not_there_is_one_problem_and_names_itself(config):
    (problem,) = check(config(model={"path": "/no/model"})).problems
    assert (problem.key, problem.value) == ("model.path", "/no/model")
    assert problem.message.startswith("no such folder")


def test_nothing_is_wrong(config):
    report = check(config(batch_size=2, num_epochs=3))
    assert report.problems == ()
    assert (report.plan.steps_per_epoch, report.plan.num_steps) == (3, 9)


def line(report, name):
    """What the text says of ``name``, in single blanks."""
    return next(" ".join(text.split()) for text in report.to_text().splitlines() if text.split()[:1] == [name])


def test_the_time_is_that_of_the_operations_of_all_rows(config, tmp_path):
    rows = write_jsonl(tmp_path / "store.jsonl", [row([5] * 10, [0] * 5 + [1] * 5)] * 4)
    data = {"train_datasets": [], "pretokenized_dataset_paths": [str(rows)], "batch_size": 4, "num_epochs": 3_000_000}
    node = {"placement": {"num_gpus_per_node": 4}}
    report = check(config(**data, **node), device=Device("slow", 80, 1e12), mfu=0.5)
    # 6 a weight and token; 6 a weight of the head and target; 12 a pair, head dimension, head and layer.
    a_row = 6 * 18432 * 10 + 6 * 32 * 128 * 5 + 12 * 4 * 8 * 2 * (10 * 11 / 2)
    assert report.num_ranks == 4
    assert "\nmemory of a rank, one of 4\n" in report.to_text()
    assert report.seconds == pytest.approx(12e6 * a_row / (0.5 * 1e12 * 4), rel=1e-12)
    assert round(report.seconds, 2) == 7.63
    assert line(report, "time") == "time 7.6 s at mfu=0.5 of 4 x 1 TFLOP/s, without evaluation and saving"


@pytest.mark.parametrize(
    ("seconds", "spoken"),
    [(0.2, "less than 1 s"), (1, "1.0 s"), (59, "59.0 s"), (90, "1.5 min"), (3600, "1.0 h"), (9_000_000, "2,500.0 h")],
)
def test_times_have_units_that_show_them(config, seconds, spoken):
    report = replace(check(config(), device=Device.named("h100")), seconds=seconds)
    assert line(report, "time").startswith(f"time {spoken} at mfu=0.4 of 4 x 989 TFLOP/s")


def test_whether_it_fits_is_said_of_nine_tenths_of_the_device(config):
    needed = check(config(), device=Device.named("h100")).memory.total
    small, large = (
        check(config(), device=Device("gpu", needed * share / 0.9 / 2**30, None)) for share in (0.9999, 1.0001)
    )
    assert (small.fits, large.fits, small.seconds) == (False, True, None)
    assert line(small, "gpu") == "gpu DOES NOT FIT: 0.42 MiB, 90% of its 0.47 MiB, can be used"
    assert line(large, "gpu").startswith("gpu fits: ")
    assert line(large, "time") == "time not known; name the GPU, as in device=h100-80g"


def test_without_a_gpu_no_device_is_made_up(config):
    report = check(config())
    assert (report.device, report.fits, report.seconds, report.num_ranks) == (None, None, None, 1)
    assert line(report, "device") == "device none; name the GPU, as in device=h100-80g"


def test_sizes_have_units_that_show_them(config):
    report = check(config(), device=Device.named("h100"))
    assert line(report, "weights") == "weights 0.02 MiB", "22,720 float32 numbers over four ranks"
    large = replace(report, memory=replace(report.memory, weights=3 * 2**30, host=2**40))
    assert line(large, "weights") == "weights 3.00 GiB"
    assert line(large, "in") == "in host memory 1,024.00 GiB"


def test_each_source_says_how_often_it_is_passed(config, tmp_path):
    files = [str(write_jsonl(tmp_path / f"{n}.jsonl", [chat(f"{i}", "b") for i in range(n)])) for n in (8, 2)]
    # An epoch is 4, 4 and 2 rows, 10 steps three of them and 4 rows: 34, of which 25.5 and 8.5 are of each source.
    weights = {"train_dataset_weights": [0.75, 0.25], "num_steps": 10, "batch_size": 4}
    report = check(config(train_datasets=files, **weights))
    assert report.plan.passes == pytest.approx((25.5 / 8, 8.5 / 2))
    assert "tokens, 16 targets, passed 3.19 times" in report.to_text()
    assert "tokens, 4 targets, passed 4.25 times" in report.to_text()
    assert report.plan.num_rows == 34


def test_packing_is_measured_by_the_places_of_its_micro_batches(config, tmp_path):
    rows = [row([4] * length, [0] + [1] * (length - 1)) for length in (7, 6, 3, 2)]
    data = {"train_datasets": [], "pretokenized_dataset_paths": [str(write_jsonl(tmp_path / "s.jsonl", rows))]}
    report = check(config(**data, batch_size=4, use_sequence_packing=True, max_length=10))
    # 7 + 3 and 6 + 2 tokens, each a row of its own length.
    assert report.plan.packing_efficiency == 1.0
    assert (report.plan.load.tokens, report.plan.load.micro_batches) == (10, 2)


def test_padding_is_measured_by_the_places_of_its_micro_batches(config, tmp_path):
    rows = [row([4] * length, [0] + [1] * (length - 1)) for length in (7, 3)]
    data = {"train_datasets": [], "pretokenized_dataset_paths": [str(write_jsonl(tmp_path / "s.jsonl", rows))]}
    padded = {"micro_train_batch_size_per_gpu": 2, "remove_microbatch_padding": False}
    report = check(config(**data, batch_size=2, **padded))
    assert report.plan.packing_efficiency == 10 / 14
    assert line(report, "packing") == "packing 71.4% of the places in micro-batches hold a token"


def test_a_dummy_run_is_planned_on_its_random_rows(config):
    report = check(config(dummy_run_full_ctx=True, dummy_run_max_steps=4, max_length=16, batch_size=6, num_epochs=2))
    assert (report.plan.num_steps, report.plan.num_rows, report.plan.total_tokens) == (4, 24, 24 * 16)
    assert [(source.name, source.kept, source.targets) for source in report.sources] == [("random", 6, 6 * 15)]
    assert report.warnings == ()
    assert "random" in report.to_text()


def test_a_prompt_that_the_model_has_no_room_for(config):
    asked = {"prompts": ["who are you?"], "max_new_tokens": 10**6}
    (problem,) = check(config(eval_generate=asked)).problems
    assert problem.key == "eval_generate.prompts"
    assert "positions" in problem.message


def test_sources_in_their_order_are_passed_one_after_the_other(config, tmp_path):
    files = [write_jsonl(tmp_path / f"{n}.jsonl", [chat("question", "answer")] * n) for n in (6, 2)]
    sources = {"train_datasets": [str(file) for file in files], "sampler": "sequential", "batch_size": 1}
    assert check(config(num_epochs=1, **sources)).plan.passes == (1.0, 1.0)
    assert check(config(num_steps=3, **sources)).plan.passes == (0.5, 0.0)
    assert check(config(num_steps=7, **sources)).plan.passes == (1.0, 0.5)
    assert check(config(num_steps=11, **sources)).plan.passes == (1.5, 1.0)


def test_problems_of_keys_hide_none_of_the_data(config):
    found = check(config(eval_interval=3, train_datasets=["/no/rows.jsonl"])).problems
    assert [problem.key for problem in found] == ["eval_interval", "train data"]
