"""The page at / in Chromium: key, chat, stream, stop, errors, figures, and what it may not do."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ostinato.engine import Engine, SamplingParams
from ostinato.server import Settings
from ostinato.server.chat.render import ChatTemplate
from serving import CHATML, MODEL, Client, make_engine, make_service, serving
from tiny import tiny_llama

pytestmark = pytest.mark.browser

KEY = "a-secret-key"
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": "0", "max-tokens": "40"}


expect.set_options(timeout=30_000)  # ms, on a busy machine


class Pace:
    """How fast the server's engine steps.

    Attributes:
        left: steps that it may still make; None is any number.
        seconds: that each one takes at least.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self.seconds = 0.0

    def engine(self) -> Engine:
        """Return an engine of this pace."""
        engine = make_engine(model=tiny_llama(max_position_embeddings=512))
        step = engine.step

        def paced() -> Any:
            while self.left == 0:
                time.sleep(0.005)
            if self.left is not None:
                self.left -= 1
            time.sleep(self.seconds)
            return step()

        engine.step = paced  # type: ignore[method-assign]
        return engine


@pytest.fixture(scope="module")
def paces() -> Pace:
    """Return the pace of the server that tests share."""
    return Pace()


@pytest.fixture
def pace(paces: Pace) -> Iterator[Pace]:
    """Return that pace, to be changed for one test."""
    yield paces
    paces.left, paces.seconds = None, 0.0


@pytest.fixture(scope="module")
def served(paces: Pace) -> Iterator[Client]:
    """Serve a chat model that needs a key."""
    service = make_service(
        paces.engine,
        template=ChatTemplate({"default": CHATML}, {}, 10.0),
        settings=Settings(port=0, api_keys=(KEY,)),
    )
    with serving(service) as client:
        yield replace(client, headers={"authorization": f"Bearer {KEY}"})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return Debian's Chromium."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert program, "no Chromium: apt-get install chromium-headless-shell"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: Client) -> Iterator[Page]:
    """Open the page, and check at the end that no script has failed and nothing else was loaded."""
    faults: list[str] = []
    asked: set[str] = set()
    context = browser.new_context()
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: said.type == "error" and faults.append(said.text))
    page.on("request", lambda request: asked.add(request.url))
    page.goto(served.url)
    yield page
    context.close()
    assert [fault for fault in faults if "401" not in fault and "400" not in fault] == []
    assert all(url.startswith(served.url) for url in asked)
    served.wait_idle()


def _enter(page: Page) -> None:
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#model")).to_have_text(MODEL)


def _send(page: Page, text: str, **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()


def _shown(text: str) -> str:
    """Return a text as a page shows it: half characters are replaced."""
    return text.encode(errors="replace").decode()


def _expected(prompt: str, count: int = 40) -> str:
    engine = make_engine(model=tiny_llama(max_position_embeddings=512))
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=count, temperature=0))
    engine.close()
    return done.text


def test_key_is_asked_for_and_kept_in_memory_only(page: Page) -> None:
    key = page.get_by_label("API key")
    expect(key).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    key.fill("wrong")
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
    _enter(page)
    expect(key).to_have_count(0)
    expect(page.get_by_role("alert")).to_be_hidden()
    kept = (
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )
    assert KEY not in page.evaluate(kept)
    assert KEY not in page.content()
    assert page.context.storage_state() == {"cookies": [], "origins": []}
    page.reload()
    expect(key).to_be_visible()


def test_chat_streams_its_answers(page: Page, pace: Pace) -> None:
    _enter(page)
    pace.left = 20
    _send(page, "hello", **GREEDY)
    answer = page.locator("#messages .assistant").first
    text = answer.locator(".text")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(text).not_to_be_empty()
    grown = text.text_content() or ""
    pace.left = None
    expect(answer).to_have_attribute("aria-busy", "false")
    first = _expected(PROMPT.format("hello"))
    assert text.text_content() == _shown(first)
    assert len(grown) < len(first)
    expect(answer.locator(".note")).to_have_text(re.compile(r"^\d+ tokens in [\d.]+ s$"))
    # The second answer knows the first.
    _send(page, "more")
    expect(page.locator("#messages .assistant[aria-busy=false]")).to_have_count(2)
    said = page.locator("#messages .assistant .text").nth(1).text_content()
    chat = PROMPT.format("hello") + f"{_shown(first)}<|im_end|>\n" + PROMPT.format("more")
    assert said == _shown(_expected(chat))
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#messages li")).to_have_count(0)
    _send(page, "hello")
    expect(page.locator("#messages .assistant .note")).to_contain_text("tokens")
    assert page.locator("#messages .assistant .text").text_content() == _shown(first)


def test_stop_ends_an_answer_on_the_server_too(page: Page, served: Client, pace: Pace) -> None:
    _enter(page)
    pace.left = 20
    _send(page, "hello", **{"temperature": "0", "max-tokens": "400"})
    answer = page.locator("#messages .assistant")
    expect(answer.locator(".text")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".note")).to_have_text("stopped")
    pace.left, pace.seconds = None, 0.05  # 400 tokens would take 20 seconds
    served.wait_idle(10)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_errors_are_told(page: Page) -> None:
    _enter(page)
    _send(page, "hello", **{"max-tokens": "5000"})
    expect(page.get_by_role("alert")).to_contain_text("expected at most 512 together")
    expect(page.locator("#messages .assistant .note")).to_have_text("failed")
    _send(page, "hello", **{"max-tokens": "3"})
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#messages .assistant .note").nth(1)).to_contain_text("tokens")


def test_figures_are_live(page: Page, pace: Pace) -> None:
    _enter(page)
    pace.seconds = 0.05

    def figure(name: str) -> Any:
        return page.locator(f"[data-figure='{name}'] dd")

    expect(figure("tokens/s")).to_have_text("0")
    expect(figure("queue")).to_have_text("0")
    _send(page, "hello", **{"temperature": "0", "max-tokens": "400"})  # draws may end at once
    expect(figure("tokens/s")).to_have_text(re.compile(r"^[1-9]\d*$"))
    expect(figure("running")).to_have_text("1")
    for name in ("graph hits", "padding", "KV cache"):
        expect(figure(name)).to_have_text(re.compile(r"^\d+\.\d%$"))
    page.get_by_role("button", name="New chat").click()


def test_texts_are_never_markup(page: Page) -> None:
    _enter(page)
    text = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    _send(page, text, **{"max-tokens": "1"})
    user = page.locator("#messages .user")
    expect(user).to_have_text(text)
    assert user.locator("*").count() == 0


def test_policy_lets_nothing_else_in(browser: Browser, served: Client) -> None:
    policy = served.send("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.url)
    said = page.evaluate(
        """async () => {
            const broken = new Promise((resolve) =>
                addEventListener("securitypolicyviolation", (e) => resolve(e.effectiveDirective)));
            try { document.body.innerHTML = "<b>x</b>"; } catch { }
            return await broken;
        }"""
    )
    assert said == "require-trusted-types-for"
    context.close()


def test_model_without_a_template_continues_texts(browser: Browser) -> None:
    with serving(make_service(make_engine)) as client:
        context = browser.new_context()
        page = context.new_page()
        page.goto(client.url)
        expect(page.locator("#hint")).to_contain_text("no chat template")
        _send(page, "abc", **GREEDY)
        expect(page.locator("#messages .assistant .note")).to_contain_text("tokens")
        assert page.locator("#messages .assistant .text").text_content() == _shown(_expected("abc"))
        context.close()
