"""The report as a browser shows it: every value there, nothing cut off, light and dark, printed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.browser.chromium import Chromium
from tests.examples import (
    broken_attempt,
    fake_engine_facts,
    measured_attempt,
    oom_attempt,
    unfit_attempt,
    unsupported_attempt,
)

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.report import write_page

pytestmark = pytest.mark.browser

SHOTS = Path(__file__).parent / "screenshots"
EVIL = "</script><img src=x onerror=alert(1)>"


def study() -> list[Attempt]:
    """Return a study as one comes out of a night: long words, many axes, every kind of ending."""
    engine = Pairs(name="vllm", engine_version="0.33.0", weights_bytes=17 * 2**30,
                   kv_cache_bytes=1850 * 2**20)  # fmt: skip
    found = []
    for index, context in enumerate((8192, 16384, 32768, 65536, 131072)):
        for at, n_max in enumerate((0, 1, 3)):
            speed = (62.0 - 6 * index) * (1.0, 1.4, 1.75)[at]
            attempt = measured_attempt(
                len(found) + 1, decode_tok_s=speed, context=context, n_max=n_max, engine=engine
            )
            point = attempt.point.with_(attention_backend="FLASHINFER_WITH_A_VERY_LONG_NAME")
            found.append(replace(attempt, point=point))
    return [
        *found, oom_attempt(20), oom_attempt(21, context=196608), unsupported_attempt(22),
        unfit_attempt(23), broken_attempt(24),
        measured_attempt(25, cache_type=EVIL, context=4096, decode_tok_s=20.0),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_page(study(), path)
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("chromium is not installed")
    with Chromium(binary) as found:
        yield found


def show(browser: Chromium, page: str, *, width: int, scheme: str = "light") -> None:
    """Open the page in a window of this width and scheme, and wait for its charts."""
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1,
        mobile=width < 600,
    )  # fmt: skip
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", media="", features=wanted)
    browser.open(page)
    browser.wait("document.documentElement.dataset.drawn === 'yes'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_the_page_fits_its_window_and_complains_of_nothing(
    browser: Chromium, page: str, width: int, scheme: str
) -> None:
    show(browser, page, width=width, scheme=scheme)
    assert browser.complaints == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    too_wide = browser.evaluate(
        "[...document.querySelectorAll('body > *')]"
        f".filter(e => e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML)"
    )
    assert too_wide == []
    # Every chart is as wide as the window lets it be, and inside it.
    charts = browser.evaluate(
        "[...document.querySelectorAll('.chart svg.main-svg')]"
        ".map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert len(charts) >= 5
    assert all(left >= 0 and right <= width for left, right in charts)
    browser.screenshot(SHOTS / f"report-{width}-{scheme}.png")


def test_the_figures_of_the_front_and_every_failure_are_there_to_read(
    browser: Chromium, page: str
) -> None:
    show(browser, page, width=1600)
    text = browser.text()
    for words in (
        "108.5", "131,056", "1536 MiB larger than what is left", "oom_kv_cache",
        "unsupported_combination", "The answer repeats one token 64 times.", "try next",
        "tokens/step, drafts of 3", "SHA-256 of the model", "RTX 4090", "× 1.",
    ):  # fmt: skip
        assert words in text, words
    assert "SIMULATED" not in text


def test_a_point_tells_its_configuration_when_hovered_over(browser: Chromium, page: str) -> None:
    show(browser, page, width=1600)
    browser.evaluate("Plotly.Fx.hover('chart-front', [{curveNumber: 1, pointNumber: 0}])")
    card = browser.wait(
        "[...document.querySelectorAll('#chart-front .hovertext')].map(e => e.textContent).join('')"
    )
    assert "tok/s" in card
    assert "n_max = 3" in card
    assert "proven of" in card


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_in_the_charts_stand_out_from_the_page(
    browser: Chromium, page: str, scheme: str
) -> None:
    show(browser, page, width=1600, scheme=scheme)
    lightness = (
        "(c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map(v => (v /= 255) <= 0.03928 ?"
        " v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b })"
    )
    paper = browser.evaluate(
        f"{lightness}(getComputedStyle(document.documentElement).backgroundColor)"
    )
    inks = browser.evaluate(
        "[...document.querySelectorAll('.chart text, p, td, th, h2, .muted')]"
        ".filter(e => e.textContent.trim()).map(e => getComputedStyle(e))"
        f".map(s => {lightness}(s.fill !== 'rgb(0, 0, 0)' ? s.fill : s.color))"
    )
    assert len(inks) > 100
    for ink in set(inks):
        light, dark = max(ink, paper), min(ink, paper)
        assert (light + 0.05) / (dark + 0.05) > 3


def test_the_charts_follow_the_scheme_while_the_page_is_open(browser: Chromium, page: str) -> None:
    show(browser, page, width=1600, scheme="light")
    fill = "getComputedStyle(document.querySelector('#chart-front .xtick text')).fill"
    light = browser.evaluate(fill)
    wanted = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="", features=wanted)
    assert browser.wait(f"{fill} !== {light!r}")


def test_what_an_engine_printed_runs_nowhere(browser: Chromium, page: str) -> None:
    show(browser, page, width=1600)
    assert EVIL in browser.text()
    assert browser.evaluate("document.images.length") == 0
    assert browser.complaints == []


def test_the_page_prints_in_light_colours_with_its_charts(browser: Chromium, page: str) -> None:
    show(browser, page, width=1600, scheme="dark")
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    browser.wait(
        "[...document.querySelectorAll('.chart svg.main-svg')]"
        ".every(e => e.getBoundingClientRect().width <= 700)"
    )
    background = browser.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--page')"
    )
    assert background.strip() == "#ffffff"
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    printed = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 50_000


def test_invented_figures_are_marked_before_anything_else(
    browser: Chromium, tmp_path: Path
) -> None:
    write_page([measured_attempt(1, engine=fake_engine_facts())], tmp_path / "r.html")
    show(browser, (tmp_path / "r.html").as_uri(), width=360)
    assert "SIMULATED" in browser.text()[:200]
    assert browser.complaints == []
