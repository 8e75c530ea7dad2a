"""The page of a real run in a real browser: it draws, answers the pointer, follows the colour scheme, and fits."""

import os
import shutil
from contextlib import contextmanager

import pytest

from burnish.report.page import write_report
from tests.report.folders import HOSTILE, hostile_run, run_folder
from tests.runs.commands import burnish, metrics
from tests.toys import chat, save_model, write_jsonl

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 240
_DRAWN = "document.querySelectorAll('.plot .main-svg').length >= 2 * document.querySelectorAll('.plot').length"
_CURVES = """() => Object.fromEntries([...document.querySelectorAll('.chart')].map(chart => [
    chart.querySelector('h4').textContent,
    chart.querySelector('.plot').data.map(({x, y, name, mode, line}) => ({x, y, name, colour: line.color})),
]))"""
_WIDTHS = "[document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"


@pytest.fixture(scope="module")
def browser():
    """That of BURNISH_BROWSER, which must work where it is set; else whichever there is."""
    path = os.environ.get("BURNISH_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("there is no browser; name one in BURNISH_BROWSER")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"executable_path": path, "args": ["--no-sandbox"], "timeout": _SECONDS * 1000}
        with playwright.chromium.launch(**options) as browser:
            yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a run of two sources and one evaluation set, made by the command, that wrote its page itself."""
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "model")
    for name in ("one", "two"):
        write_jsonl(folder / f"{name}.jsonl", [chat(f"{name} {n}", f"answer {n}") for n in range(12)])
    write_jsonl(folder / "held.jsonl", [chat("held", "answer")])
    done = burnish(
        *["train", "model.path=model", "train_datasets=[one.jsonl,two.jsonl]", "train_dataset_weights=[1,1]"],
        *[
            "eval_datasets=held.jsonl",
            "eval_dataset_names=heldout",
            "eval_interval=20",
            "num_steps=40",
            "num_workers=0",
        ],
        *["optimizer_config.lr=0.001", "use_sequence_packing=true", "max_length=128", "batch_size=4"],
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "report: runs/sft/report.html" in done.stderr
    return folder


@contextmanager
def opened(browser, file, *, width=1440, scheme="light"):
    """The page, drawn; at its end nothing was said on the console, and nothing was asked of anybody."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(_SECONDS * 1000)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_function(_DRAWN)
    yield page
    assert said == []
    assert asked == [file.as_uri()]
    context.close()


def test_the_curves_are_those_of_the_run(browser, folder):
    steps = metrics(folder)
    with opened(browser, folder / "runs/sft/report.html") as page:
        curves = page.evaluate(_CURVES)
        raw, mean = curves["Training loss"]
        assert raw["x"] == mean["x"] == list(range(1, 41))
        assert raw["y"] == pytest.approx([steps[step]["train/loss"] for step in raw["x"]], rel=1e-6)
        assert mean["y"][9] == pytest.approx((raw["y"][8] + raw["y"][9]) / 2, rel=1e-6)
        (held,) = curves["Evaluation loss"]
        assert (held["x"], held["name"]) == ([20, 40], "heldout")
        assert held["y"] == pytest.approx([steps[step]["eval/heldout/loss"] for step in (20, 40)], rel=1e-6)
        by_source = {curve["name"]: curve for curve in curves["Training loss by source"]}
        assert {"one.jsonl", "two.jsonl"} < set(by_source)
        assert len({curve["colour"] for curve in by_source.values()}) == 2
        assert curves["Learning rate"][0]["y"] == pytest.approx([steps[s]["train/lr"] for s in steps], rel=1e-6)
        more = {"Gradient norm", "Throughput", "Time of a step", "Waiting for data", "Packing efficiency"}
        assert more < set(curves)
        paths = page.evaluate(
            "[...document.querySelectorAll('.plot .js-line')].filter(p => p.getAttribute('d')).length"
        )
        assert paths == sum(map(len, curves.values()))
        assert page.locator("#rows mark").filter(has_text="answer").count() == 4
        assert page.locator("#data tbody tr").count() == 3


def test_pointing_shows_values_and_a_name_hides_its_curve(browser, folder):
    steps = metrics(folder)
    with opened(browser, folder / "runs/sft/report.html") as page:
        plot = page.locator(".plot").first
        box = plot.locator(".nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
        page.wait_for_function("document.querySelector('.plot .hoverlayer').textContent.includes('mean of 2')")
        shown = plot.locator(".hoverlayer").text_content()
        at = [step for step in steps if shown.startswith(f"{step}Training loss : {steps[step]['train/loss']:.5g}"[:20])]
        assert len(at) == 1, shown
        assert at[0] in range(18, 24)

        chart = page.locator(".chart", has_text="Training loss by source")
        button = chart.get_by_role("button", name="two.jsonl")
        visible = "plot => plot.data.map(curve => curve.visible)"
        assert chart.locator(".plot").evaluate(visible) == [True] * 4
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert chart.locator(".plot").evaluate(visible) == [True, True, False, False]


def test_dark_and_light_also_when_they_change(browser, folder):
    look = """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
        document.querySelector('.plot').data[0].line.color, document.querySelector('.plot').layout.font.color]"""
    with opened(browser, folder / "runs/sft/report.html", scheme="dark") as page:
        dark = page.evaluate(look)
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"before => ({look})()[2] !== before", arg=dark[2])
        light = page.evaluate(look)
    assert all(before != after for before, after in zip(dark, light, strict=True))
    assert brightness(dark[0]) < 40 < 215 < brightness(light[0])
    assert brightness(light[1]) < 60 < 200 < brightness(dark[1])


def brightness(colour):
    """0 to 255 of ``rgb(r, g, b)``."""
    return sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) / 3


@pytest.mark.parametrize("width", [360, 1440])
def test_the_page_is_as_wide_as_the_window(browser, folder, width):
    with opened(browser, folder / "runs/sft/report.html", width=width) as page:
        assert page.evaluate(_WIDTHS) == [width] * 3
        page.locator("summary").click()
        assert page.evaluate(_WIDTHS) == [width] * 3, "with all keys shown"
        sizes = page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.getBoundingClientRect().width)")
        assert min(sizes) > 250


def test_what_users_wrote_is_only_shown(browser, tmp_path):
    folders = [hostile_run(tmp_path / "<img src=x onerror=alert(3)>"), run_folder(tmp_path / ("b" * 150))]
    file = write_report(folders, out=tmp_path / "page.html")
    with opened(browser, file, width=360) as page:
        curves = page.evaluate(_CURVES)
        assert len(curves["Training loss"]) == 2
        assert page.locator("img").count() == 0
        names = page.locator(".legend button").all_text_contents()
        assert f"<img src=x onerror=alert(3)> · {HOSTILE}" in names
        assert HOSTILE in page.locator("#rows pre mark").first.text_content()
        assert page.evaluate(_WIDTHS) == [360] * 3
