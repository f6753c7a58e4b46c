"""The chat page in a real browser, against the scripted engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from api.app import create_app
from api.config import ServeConfig
from lm_engine.outputs import RequestError
from tests.api.browser import CHROMIUM, Browser
from tests.api.fakes import FakeEngine, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path"),
]

SHOTS = os.environ.get("TEST_SHOTS")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    try:
        yield browser
    finally:
        browser.close()


def _shoot(browser: Browser, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")


def _ask(browser: Browser, text: str) -> None:
    browser.evaluate("document.getElementById('question').focus()")
    browser.type(text)
    browser.press_enter()


def test_page_chat_with_image_stop_and_error(
    browser: Browser, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    picture = Image.new("RGB", (320, 200), "white")
    ImageDraw.Draw(picture).text((60, 60), "4 8 15 16", fill="black", font_size=48)
    picture.save(tmp_path / "numbers.png")
    engine = FakeEngine(script="The picture shows the numbers 4, 8, 15 and 16.\n", delay_s=0.01)
    config = ServeConfig(model="tiny")
    app = create_app(config, engine, model_path=folders("qwen2_5_vl"))
    with served(app) as address:
        browser.command("Page.navigate", url=address)
        browser.until("document.getElementById('about')?.textContent.includes('2,048')")
        _shoot(browser, "1-empty")
        browser.choose_file("#file", tmp_path / "numbers.png")
        browser.until("document.querySelectorAll('#thumbs img').length === 1")
        _shoot(browser, "2-thumb")
        _ask(browser, "Which numbers are in the picture?")
        browser.until("document.querySelector('.streaming')")
        browser.until("!document.querySelector('.streaming, .waiting')")
        _shoot(browser, "3-answer")
        assert browser.evaluate("document.querySelector('.assistant .text').textContent") == (
            engine.script
        )
        figures = browser.evaluate("document.querySelector('.assistant .figures').innerText")
        for word in ("first token", "tokens/s", "image tokens", "prompt", "answer"):
            assert word in figures, figures
        assert len(engine.seen[0].media) == 1
        assert engine.seen[0].media_bytes[0] == (tmp_path / "numbers.png").read_bytes()

        engine.script = "never ending " * 500
        _ask(browser, "Go on.")
        browser.until("document.querySelectorAll('.assistant .text')[1]?.textContent.length > 40")
        browser.evaluate("document.getElementById('stop').click()")
        browser.until("!document.querySelector('.streaming')")
        browser.until("document.body.innerText.includes('stopped')")
        deadline = time.monotonic() + 5
        while engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.seen[1].ended == "aborted"

        engine.error = RequestError("overloaded", "The server is full. Try again later.")
        browser.evaluate("document.getElementById('theme').click()")
        _ask(browser, "Once more?")
        browser.until("document.querySelector('.error')")
        below = "(m => m.scrollHeight - m.scrollTop - m.clientHeight)"
        browser.until(f"{below}(document.querySelector('main')) < 2")
        _shoot(browser, "4-error-dark")
        assert "Try again later." in browser.evaluate("document.querySelector('.error').innerText")
        assert browser.evaluate("document.getElementById('question').value") == "Once more?"
        assert [line for line in browser.console if "503" not in line] == []
