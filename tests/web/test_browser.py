"""The page in a real Chromium: `make web-test`. Skipped where there is no browser, and by `make test`.

With `SHOTS=folder` it leaves pictures of the page there; `MODEL=bundled` tells it of a real model.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if os.environ.get("BLENDKV_WEB_TEST") != "1":
    pytest.skip("a test in a browser: make web-test", allow_module_level=True)
if BROWSER is None:
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)

from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402

from blendkv.testing import byte_tokenizer, tiny_model  # noqa: E402
from tests.web.serving import Slow, served, wait_for  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
MODEL, SHOTS = os.environ.get("MODEL"), os.environ.get("SHOTS")
LONG = 300_000 if MODEL else 60_000
"""Milliseconds in which a run has to be over, and whatever else is waited for."""
expect.set_options(timeout=LONG)
NOTE_STATUS = """() => {
  window.noted = [];
  const note = () => window.noted.push(document.querySelector("#bk-status .bk-status").textContent);
  document.querySelector("#bk-stop").addEventListener("click", note);
}"""
"""Keeps what the status says right after each click on Stop."""
TEXTS = ("The crossing opened on 1 July 2000.", "An octopus has blue blood. It is copper.", "Emus won a war once.")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The command itself, in a process of its own."""
    name = MODEL
    if name is None:
        folder = tmp_path_factory.mktemp("model")
        tiny_model("llama", max_position_embeddings=8192).save_pretrained(folder)
        byte_tokenizer(chat=True).save_pretrained(folder)
        name = str(folder)
    command = [sys.executable, "-m", "blendkv", "demo", "--web", "--port", "0", "--model", name]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"the page is at (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        pytest.fail("".join(lines))
    yield found[1]
    server.send_signal(signal.SIGINT)
    _, rest = server.communicate(timeout=60)
    assert "Traceback" not in rest, rest
    assert server.returncode in (0, 130, -signal.SIGINT)


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        # no name is looked up: a request for another host could only fail, and is counted below
        options = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=options)
        yield browser
        browser.close()


class Visit:
    """A visitor's page, with what its console said and what it asked for."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.said, self.asked = page, [], []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.set_default_timeout(LONG)
        page.goto(url)
        page.wait_for_selector("#bk-run")
        self.status, self.cards = page.locator("#bk-status :is(.bk-status, .bk-error)"), page.locator(".bk-card")

    def until(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition comes true in time; the page and its routes go on meanwhile."""
        end = time.monotonic() + LONG / 1000
        while not condition() and time.monotonic() < end:
            self.page.wait_for_timeout(20)
        return condition()

    def write(self, *texts: str) -> None:
        """Into the documents, the others left empty."""
        for i in range(5):
            self.page.locator(f"#bk-document-{i + 1} textarea").fill(texts[i] if i < len(texts) else "")

    def done(self) -> None:
        expect(self.status).to_contain_text("Done")
        expect(self.page.locator(".bk-done")).to_have_count(3)
        for i in range(3):
            expect(self.cards.nth(i).locator(".bk-answer")).not_to_have_text(re.compile(r"^(no answer yet|…|\s*)$"))

    def shot(self, name: str) -> None:
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            self.page.wait_for_timeout(500)
            self.page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)


@pytest.fixture
def visit(chromium, url):
    """`visit(width, height, **options)`: a new visitor; at the end all consoles were silent, no other host asked."""
    visits, contexts = [], []

    def make(width=1440, height=900, **options) -> Visit:
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **options))
        visits.append(Visit(contexts[-1].new_page(), url))
        return visits[-1]

    yield make
    for context in contexts:
        context.close()
    for made in visits:
        assert made.said == []
        assert len(made.asked) > 5
        assert [asked for asked in made.asked if not asked.startswith((url, "data:", "blob:"))] == []


def test_click_through(visit):
    """Edit, move the ratio, choose a selector, run; twice."""
    v = visit()
    v.shot("wide-before")
    nasty = '<script>alert(1)</script><img src=x onerror=alert(2)> & "quotes"'
    if not MODEL:
        v.write(*TEXTS, nasty)
    v.page.click("#bk-run")
    v.done()
    v.shot("wide-after")
    if not MODEL:
        expect(v.page.locator("#bk-tokens section").nth(4)).to_contain_text(nasty)
        assert v.page.locator("#bk-tokens script, #bk-tokens img").count() == 0
    expect(v.page.locator(".bk-bars li")).to_have_count(3)
    expect(v.page.locator(".bk-bars li").nth(2)).to_contain_text(re.compile(r"\d (ms|s) · [\d.]+x (sooner|later)"))
    expect(v.page.locator("#bk-origins")).to_contain_text("Computed now, and kept")
    before = v.page.locator("#bk-tokens mark").count()
    v.page.locator("#bk-ratio input[type=number]").fill("0.5")
    v.page.click("#bk-selector input")
    v.page.get_by_role("option", name=re.compile("boundary: first")).click()
    v.page.click("#bk-shuffle")
    v.page.click("#bk-run")
    expect(v.page.locator("#bk-origins")).to_contain_text("the prompt (boundary)")
    v.done()
    expect(v.cards.nth(2)).to_contain_text("50%")
    expect(v.page.locator("#bk-origins")).not_to_contain_text("Computed now")  # in another order, and all there
    assert v.page.locator("#bk-tokens mark").count() > 2 * before > 0
    style = "e => [getComputedStyle(e).outlineStyle, parseFloat(getComputedStyle(e).outlineWidth)]"
    outline = v.page.locator("#bk-tokens mark").first.evaluate(style)
    assert outline[0] == "solid"
    assert outline[1] >= 1


def test_keyboard_alone(visit):
    """Tab to the question, Enter; Ctrl-Enter from a document; the slider by arrows. The focus is not lost."""
    v = visit()
    v.write(*TEXTS)
    v.page.locator("body").focus()
    where = "() => (document.activeElement.closest('[id^=bk-]') || {}).id || ''"
    order = []
    for _ in range(40):
        v.page.keyboard.press("Tab")
        order.append(v.page.evaluate(where))
        if order[-1] == "bk-document-5":
            break
    wanted = ["bk-question", "bk-ratio", "bk-selector", "bk-run", "bk-stop", "bk-shuffle", "bk-more", "bk-document-1"]
    seen = list(dict.fromkeys(name for name in order if name))
    assert [name for name in seen if name in wanted] == wanted
    v.page.locator("#bk-question input").focus()
    v.page.keyboard.press("Control+A")
    v.page.keyboard.type("When did the crossing open?")
    v.page.keyboard.press("Enter")
    v.done()
    assert v.page.evaluate(where) == "bk-question"
    v.page.locator("#bk-ratio input[type=range]").focus()
    for _ in range(5):
        v.page.keyboard.press("ArrowRight")
    v.page.locator("#bk-document-1 textarea").focus()
    v.page.keyboard.press("Control+End")
    v.page.keyboard.type(" It is long.")
    v.page.keyboard.press("Control+Enter")
    expect(v.cards.nth(2)).to_contain_text("20%")
    v.done()
    expect(v.page.locator("#bk-tokens section").nth(1)).to_contain_text("It is long.")
    assert v.page.evaluate(where) == "bk-document-1"
    labels = "() => [...document.querySelectorAll('input, textarea')].filter(e => !e.labels?.length && !e.ariaLabel)"
    assert v.page.evaluate(f"({labels})().map(e => e.outerHTML)") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_does_not_scroll_sideways(visit, scheme):
    v = visit(390, 844, color_scheme=scheme)
    wide = "document.documentElement.scrollWidth"
    assert v.page.evaluate(wide) <= 390
    v.shot(f"narrow-{scheme}-before")
    if not MODEL:
        v.write(*TEXTS, "averyveryverylongwordwithoutanyspaces" * 20)
    v.page.click("#bk-run")
    v.done()
    assert v.page.evaluate(wide) <= 390
    expect(v.status).to_be_in_viewport()  # far below; scrolled to
    expect(v.page.locator("#bk-stop")).to_be_in_viewport()
    v.page.click("#bk-origins summary")
    assert v.page.evaluate(wide) <= 390
    v.shot(f"narrow-{scheme}-after")


def test_what_is_wrong_is_said_and_the_page_goes_on(visit):
    v = visit()
    v.write(*TEXTS)
    v.page.locator("#bk-question input").fill(" ")
    v.page.click("#bk-run")
    expect(v.page.locator(".bk-error")).to_have_text("The question is empty: ask something.")
    v.page.locator("#bk-question input").fill("why?")
    v.write()
    v.page.click("#bk-run")
    expect(v.page.locator(".bk-error")).to_contain_text("All documents are empty")
    v.write("long " * 9_000)
    v.page.click("#bk-run")
    expect(v.page.locator(".bk-error")).to_contain_text("The documents have 45,000 characters")
    v.write(TEXTS[0], TEXTS[0])
    v.page.locator("#bk-selector input").fill("magic")
    v.page.keyboard.press("Tab")
    v.page.click("#bk-run")
    expect(v.page.locator(".bk-error")).to_contain_text("Unknown selector 'magic'")
    v.page.locator("#bk-selector input").fill("hkvd@per-chunk")
    v.page.keyboard.press("Tab")
    v.page.click("#bk-run")
    v.done()
    expect(v.page.locator("#bk-origins")).to_contain_text("hkvd@per-chunk")


def test_two_visitors_get_their_own(visit):
    one, two = visit(), visit()
    one.write("Alpha is the first letter.", "One more.")
    two.write("Omega is the last letter.", "Two more.")
    one.page.click("#bk-run")
    two.page.click("#bk-run")
    one.done()
    two.done()
    expect(one.page.locator("#bk-tokens")).to_contain_text("Alpha")
    expect(two.page.locator("#bk-tokens")).to_contain_text("Omega")
    expect(one.page.locator("#bk-tokens")).not_to_contain_text("Omega")
    expect(two.page.locator("#bk-tokens")).not_to_contain_text("Alpha")


def test_adding_documents(visit):
    v = visit()
    expect(v.page.locator("#bk-document-6 textarea")).to_have_count(0)
    v.page.click("#bk-more")
    v.page.locator("#bk-document-6 textarea").fill("A sixth one.")
    v.write("The first one.")
    v.page.click("#bk-run")
    v.done()
    expect(v.page.locator("#bk-tokens section").nth(2)).to_contain_text("A sixth one.")
    for count in (7, 8):  # whatever is written in the others
        v.page.click("#bk-more")
        expect(v.page.locator(f"#bk-document-{count} textarea")).to_be_visible()
    expect(v.page.locator("#bk-more")).to_be_disabled()
    expect(v.page.locator("#bk-document-6 textarea")).to_have_value("A sixth one.")


def test_stop_another_run_and_closing_the_page_end_what_is_computed(chromium):
    """On a stand-in that would take a minute."""
    slow = Slow()
    with served(slow) as address:
        context = chromium.new_context()
        v = Visit(context.new_page(), address)
        v.page.click("#bk-stop")  # there is nothing to stop
        expect(v.status).to_contain_text("Ready.")
        v.page.click("#bk-run")
        assert wait_for(lambda: slow.running == 1)
        v.page.evaluate(NOTE_STATUS)
        held = []
        v.page.route("**/run/**", lambda route: held.append((route, route.fetch())))
        v.page.click("#bk-stop")
        expect(v.status).to_have_text("Stopped.")
        assert v.until(lambda: len(held) == 1)
        for route, response in held:  # the answer to the click comes last, and does not undo what the run said
            route.fulfill(response=response)
        v.page.unroute_all()
        v.page.wait_for_timeout(500)
        expect(v.status).to_have_text("Stopped.")
        assert v.page.evaluate("noted") == ["Stopping at the next token ..."]
        assert wait_for(lambda: slow.running == 0)
        v.page.click("#bk-run")
        assert wait_for(lambda: slow.running == 1)
        v.page.click("#bk-run")  # another run in place of the first
        assert wait_for(lambda: len(slow.asked) == 3)
        assert wait_for(lambda: slow.running == 1)
        waiting = Visit(context.new_page(), address)
        waiting.page.click("#bk-run")
        expect(waiting.status).to_have_text("Waiting for a turn ...")
        expect(waiting.page.locator("#bk-status [data-testid=status-tracker]")).to_contain_text("queue")
        for part in ("status", "results"):  # seconds and places that Gradio counts there are not read out
            assert "queue" not in waiting.page.locator(f"#bk-{part}").aria_snapshot()
        waiting.page.close()  # while it waits: its turn does not come
        v.page.close()  # without a word
        assert wait_for(lambda: slow.running == 0)
        context.close()
    assert slow.most_at_once == 1
