"""Curves keep their values and their spikes, however long they are."""

import json

import numpy as np
import pytest

from burnish.report.curves import charts, running_mean, smoothing_window, thinned
from burnish.report.read import Curve, read_runs
from tests.report.folders import metrics_line, run_folder


def by_title(runs):
    return {chart["title"]: chart for chart in charts(runs)}


def test_a_running_mean_by_hand():
    values = np.array([2.0, 4.0, np.nan, 9.0, np.nan, np.nan, np.nan, 1.0])
    expected = [2.0, 3.0, 3.0, 6.5, 9.0, 9.0, np.nan, 1.0]
    np.testing.assert_allclose(running_mean(values, 3), expected)


def test_a_spike_leaves_nothing_in_the_means_after_it():
    values = np.array([1.0, 1e20, 1.0, 1.0, 1.0, 1.0])
    assert running_mean(values, 2).tolist() == [1.0, 5e19, 5e19, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("points", "window"), [(1, 1), (39, 1), (40, 2), (1000, 50), (10**6, 500)])
def test_a_mean_is_of_a_twentieth(points, window):
    assert smoothing_window(points) == window


def test_a_million_steps_become_two_thousand_points_with_every_spike():
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[[0, 123_456, 999_998]] = [7.0, 50.0, -50.0]
    values[400_000:600_000] = np.nan
    curve = thinned(Curve(np.arange(1_000_000), values))
    assert 1500 < len(curve.steps) <= 2000
    assert (np.diff(curve.steps) > 0).all()
    shown = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    assert (shown[0], shown[123_456], shown[999_998], shown[999_999]) == (7.0, 50.0, -50.0, values[-1])
    assert np.isnan([value for step, value in shown.items() if 401_100 < step < 598_900]).all()
    np.testing.assert_array_equal(curve.values, values[curve.steps])


def test_a_short_curve_stays_as_it_is():
    curve = Curve(np.arange(2000), np.arange(2000.0))
    assert thinned(curve) is curve


def test_each_metric_has_its_chart(tmp_path):
    lines = [
        {"train/loss": 2.0, "train/loss/b.jsonl": 3.0, "train/mfu": None, "train/packing_efficiency": 0.91},
        {"train/loss": None, "train/loss/a_b.jsonl": 1.0, "eval/h/o/loss": 1.5, "mine/score": 4, "train/epoch": 0.5},
        {"train/loss": 1.2345678901, "timing/forward_backward": 0.5, "eval/h/o/num_targets": 9},
    ]
    runs = read_runs([run_folder(tmp_path / "a", [json.dumps({"step": n} | x) for n, x in enumerate(lines, 1)])])
    found = by_title(runs)
    assert list(found) == [
        "Training loss",
        "Evaluation loss",
        "Training loss by source",
        "Time of a step",
        "Packing efficiency",
        "mine/score",
    ]
    (loss,) = found["Training loss"]["traces"]
    assert (loss["x"], loss["y"], loss["name"]) == ([1, 2, 3], [2.0, None, 1.234568], "Training loss")
    assert [t["name"] for t in found["Training loss by source"]["traces"]] == ["a_b.jsonl", "b.jsonl"]
    assert found["Packing efficiency"]["traces"][0]["y"] == [91.0]
    assert found["Evaluation loss"]["traces"][0]["name"] == "h/o"
    assert found["Time of a step"]["traces"][0]["name"] == "forward backward"


def test_a_noisy_curve_has_its_mean_over_it(tmp_path):
    lines = [metrics_line(step, train_loss=float(step % 2)) for step in range(1, 61)]
    raw, mean = by_title(read_runs([run_folder(tmp_path / "a", lines)]))["Training loss"]["traces"]
    assert (raw["style"], mean["style"], mean["name"]) == ("raw", "line", "Training loss, mean of 3")
    assert raw["y"] == [float(step % 2) for step in range(1, 61)]
    assert mean["y"][:4] == [1.0, 0.5, 0.6666667, 0.3333333]


def test_runs_lie_over_each_other_in_colours_of_their_own(tmp_path):
    lines = [json.dumps({"step": 1, "train/loss": 1.0, "eval/x/loss": 2.0, "eval/y/loss": 3.0})]
    runs = read_runs([run_folder(tmp_path / name / "sft", lines) for name in "ab"])
    found = by_title(runs)
    assert [(t["name"], t["colour"]) for t in found["Training loss"]["traces"]] == [("a/sft", 0), ("b/sft", 1)]
    looks = [(t["name"], t["colour"], t["dash"]) for t in found["Evaluation loss"]["traces"]]
    assert looks == [("a/sft · x", 0, 0), ("a/sft · y", 0, 1), ("b/sft · x", 1, 0), ("b/sft · y", 1, 1)]
