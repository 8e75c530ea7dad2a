"""The page says what the folder holds, and nothing in it is more than text."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.report.page import _number, render, summary, write_report
from burnish.report.read import read_runs
from tests.report.folders import HOSTILE, facts_of, hostile_run, metrics_line, run_folder


class Page(HTMLParser):
    """The elements of a page, and the texts that it shows."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        if self.cdata_elem is None:  # of a script or a style
            self.texts.append(text)

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


def numbers(step, **more):
    known = {"train_num_tokens": 100, "train_num_targets": 40, "train_total_tokens": 100 * step, "timing_step": 0.5}
    return metrics_line(step, **known | more)


def test_a_run_in_numbers(tmp_path):
    lines = [
        metrics_line(0, **{"eval_h/loss": 4.0}),
        numbers(1, train_loss=3.0, timing_data_wait=0.1, train_mfu=0.2, train_skipped=0, timing_eval=2.0),
        numbers(2, train_loss=2.0, train_epoch=0.5, train_mfu=0.4, train_skipped=1, **{"eval_h/loss": 1.25}),
        numbers(3, train_loss=None, train_memory_peak_gib=7.5, timing_checkpoint=1.0, **{"eval_h/loss": 1.5}),
    ]
    found = summary(read_runs([run_folder(tmp_path / "a", lines)])[0])
    assert (found.step, found.epoch, found.tokens, found.targets) == (3, 0.5, 300, 120)
    assert (found.loss, found.loss_mean, found.best) == (2.0, 2.0, {"h": (1.25, 2)})
    assert (found.seconds, found.tokens_per_second, found.skipped) == (4.5, 200.0, 1)
    assert found.waiting == pytest.approx(0.1 / 1.5)
    assert found.mfu == pytest.approx(0.3)
    assert found.memory_gib == 7.5


def test_the_page_of_one_run(tmp_path):
    answers = [{"step": s, "prompt": "why?", "answer": f"because {s}"} for s in range(100)]
    config = 'model.path: "m"\nbatch_size: 8\n\n# defaults\n# seed: 42\n'
    folder = run_folder(tmp_path / "mine", facts=facts_of("chats.jsonl"), answers=answers, config=config)
    page = Page(render(read_runs([folder])))
    text = " ".join(" ".join(page.texts).split())
    assert "chats.jsonl training 5 3 2 no_target 30 10" in text
    assert "Row 4 chats.jsonl · 7 tokens, 2 targets a row a row" in text
    assert "why? Step Answer 0 because 0 9 because 9 18 because 18" in text
    assert "99 because 99 12 of 100 answers." in text
    assert text.index("batch_size 8") < text.index("All other keys (1)") < text.index("seed 42")
    assert [t for t in page.tags if "src" in t[1] or t[1].get("href", "#")[0] not in "#d"] == []
    assert (page.count("h1"), page.count("title"), page.count("main")) == (1, 1, 1)
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert viewport in [attributes for tag, attributes in page.tags if tag == "meta"]


def test_what_is_not_there_has_no_section(tmp_path):
    page = render(read_runs([run_folder(tmp_path / "a")]))
    assert not any(f'id="{name}"' in page for name in ("generations", "data", "rows"))


def test_several_runs_show_shared_data_once_and_differing_keys(tmp_path):
    folders = [
        run_folder(tmp_path / name, facts=facts_of("same"), config=f"seed: {seed}\nlogger: []\n")
        for name, seed in (("a", 1), ("b", 2))
    ]
    page = Page(render(read_runs(folders)))
    text = " ".join(" ".join(page.texts).split())
    assert "a vs b" in text
    assert "seed differs 1 2" in text
    assert "logger [] []" in text
    assert text.count("same training") == 1
    assert "a, b" in text


def test_text_of_users_cannot_leave_its_place(tmp_path):
    plain = render(read_runs([run_folder(tmp_path / "plain", facts=facts_of("x"))]))
    hostile = hostile_run(tmp_path / "<script>alert(3)<")
    page = render(read_runs([hostile]))
    parsed = Page(page)
    assert parsed.count("script") == Page(plain).count("script") == 3
    assert parsed.count("img") == 0
    shown = [text for text in parsed.texts if "alert" in text]
    assert sum(HOSTILE in text for text in shown) >= 8, "source, spans, prompt, answer, titles, config"
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)[1])
    assert HOSTILE in {chart["title"] for chart in charts}
    assert HOSTILE in {trace["label"] for chart in charts for trace in chart["traces"]}


def test_the_command_writes_the_page_of_the_first_run_or_to_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "lr=1e-5"):
        run_folder(tmp_path / "runs" / name)
    assert main(["report", "runs/a", "runs/lr=1e-5"]) == 0
    assert capsys.readouterr().out == "runs/a/report.html\n"
    assert "a vs lr=1e-5" in (tmp_path / "runs/a/report.html").read_text(encoding="utf-8")
    assert main(["report", "out=new/x.html", "runs/a"]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.html"]
    assert sorted(path.name for path in (tmp_path / "runs/a").iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
    ]


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    folder = run_folder(tmp_path / "a")
    (tmp_path / "taken").mkdir()
    assert main(["report", str(folder), f"out={tmp_path / 'taken'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "taken"]


def test_a_long_run_makes_a_small_page(tmp_path):
    lines = [metrics_line(step, train_loss=1 / step, train_lr=1e-5) for step in range(1, 50_001)]
    bare = write_report([run_folder(tmp_path / "short")]).stat().st_size
    assert write_report([run_folder(tmp_path / "long", lines)]).stat().st_size < bare + 200_000


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (999_499, "999,499"),
        (999_999, "999,999"),
        (1e6, "1 M"),
        (999_400_000, "999 M"),
        (999_960_000, "1 B"),
        (1.2345e9, "1.23 B"),
        (999.9e9, "1 T"),
        (1.5e12, "1.5 T"),
        (-2e6, "-2 M"),
        (12345.6, "12,346"),
        (0.0123, "0.0123"),
    ],
)
def test_a_number_is_short(value, shown):
    assert _number(value) == shown


def test_a_page_that_is_not_finished_leaves_nothing(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "a")
    before = sorted(folder.iterdir())

    def killed(*_):
        raise SystemExit(143)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(SystemExit):
        write_report([folder])
    assert sorted(folder.iterdir()) == before
