"""The page in gradio, without a browser: it is built, served and called; it asks nobody else for anything."""

import ipaddress
import json
import re
import socket
import threading
import warnings

import pytest

gradio = pytest.importorskip("gradio", reason="pip install 'blendkv[web]'")

import httpx  # noqa: E402

from blendkv.web import page  # noqa: E402
from tests.web.conftest import DOCUMENTS, QUESTION  # noqa: E402
from tests.web.serving import Slow, served, wait_for  # noqa: E402


@pytest.fixture(scope="module")
def url(comparison):
    with served(comparison) as address:
        yield address


def call(url: str, documents, question=QUESTION, ratio=0.25, selector="hkvd"):
    """(event, data) pairs of the endpoint, as any HTTP client sees them."""
    api = f"{url}/gradio_api/call/compare"
    with httpx.Client(timeout=60) as client:
        made = client.post(api, json={"data": [documents, question, ratio, selector]})
        assert made.status_code == 200, made.text
        text = client.get(f"{api}/{made.json()['event_id']}").text
    return [(event, json.loads(data)) for event, data in re.findall(r"event: (\w+)\ndata: (.*)", text)]


def test_the_endpoint_tells_and_then_is_complete(url, comparison):
    events = call(url, list(DOCUMENTS), QUESTION, 1.0, "boundary")
    assert [event for event, _ in events][-1] == "complete"
    last = [data for event, data in events if event == "generating"][-1][0]
    assert last["finished"]
    full, _, blend = last["methods"]
    assert (full["method"], blend["method"], blend["recomputed"]) == ("full recompute", "blend", 1.0)
    assert full["text"] == blend["text"] != ""
    assert all(method["ttft_s"] > 0 for method in last["methods"])
    assert len(events) > 10


def test_the_client_of_the_guide(url):
    client = pytest.importorskip("gradio_client").Client(url, verbose=False)
    try:
        given = (["The crossing opened on 1 July 2000."], "When did it open?", 0.15, "hkvd")
        result = client.predict(*given, api_name="/compare")
        assert client.predict(*given[:2], api_name="/compare")["finished"]  # ratio and selector have defaults
    finally:
        client.close()
    assert [method["method"] for method in result["methods"]] == ["full recompute", "full reuse", "blend"]


@pytest.mark.parametrize(
    ("documents", "question", "options", "said"),
    [
        (["", " "], QUESTION, [], "All documents are empty"),
        ([3], QUESTION, [], "Document 1 is a int"),
        ({"a": 1}, QUESTION, [], "The documents are a dict"),
        (list(DOCUMENTS), "", [], "The question is empty"),
        (list(DOCUMENTS), QUESTION, [7], "The share to recompute is 7"),
        (list(DOCUMENTS), QUESTION, [0.1, "magic"], "Unknown selector 'magic'"),
        (["a " * 2100], QUESTION, [], "The prompt has 4,"),
        (["a" * 50_000], QUESTION, [], "The documents have 50,000 characters"),
    ],
)
def test_bad_input_is_one_sentence_and_the_page_goes_on(url, documents, question, options, said):
    event, data = call(url, documents, question, *options)[-1]
    assert event == "error"
    assert data["error"].startswith(said)
    assert call(url, list(DOCUMENTS))[-1][0] == "complete"


def test_what_the_browser_is_given_names_no_other_host(url):
    """The page itself, its style and its settings. (What its scripts ask for is watched in test_browser.py.)"""
    with httpx.Client(timeout=30) as client:
        shown = client.get(f"{url}/").text
        style = client.get(f"{url}/theme.css").text
    assert "bk-run" in shown
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//[^"' >]+""", shown)
    assert not re.findall(r"url\(['\"]?(?:https?:)?//|@import", style)
    assert '"analytics_enabled":false' in shown.replace(" ", "")
    assert "/gradio_api/runs" not in shown


def test_no_other_machine_is_asked(comparison, monkeypatch):
    """Building, serving and calling: every connection and every name looked up is this machine's."""
    asked: list[str] = []
    real_connect, real_lookup = socket.socket.connect, socket.getaddrinfo

    def note(host):
        name = host.decode() if isinstance(host, bytes) else str(host)
        local = name in ("localhost", "None", "") or (name[0].isdigit() and ipaddress.ip_address(name).is_loopback)
        if not local:
            asked.append(name)

    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            note(address[0])
        return real_connect(self, address)

    def lookup(host, *args, **kwargs):
        note(host)
        return real_lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    before = threading.active_count()
    with served(comparison) as address:
        assert call(address, list(DOCUMENTS))[-1][0] == "complete"
    assert wait_for(lambda: threading.active_count() <= before + 2)  # nothing goes on asking in the background
    assert asked == []


def test_one_at_a_time_and_everybody_gets_their_own():
    slow = Slow(seconds=0.5)
    found: dict[str, list] = {}
    with served(slow) as address:

        def visit(name):
            found[name] = call(address, [name])

        threads = [threading.Thread(target=visit, args=(name,)) for name in ("aaa", "bbb", "ccc")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert slow.most_at_once == 1
    assert sorted(slow.asked) == [("aaa",), ("bbb",), ("ccc",)]
    for name, events in found.items():
        assert events[-1][0] == "complete"
        texts = {data[0]["methods"][0]["text"] for event, data in events if event == "generating"}
        assert {word for text in texts for word in text.split()} == {name}


def test_who_goes_away_is_not_answered_any_longer():
    slow = Slow()
    with served(slow) as address, httpx.Client(timeout=30) as client:
        api = f"{address}/gradio_api/call/compare"
        event = client.post(api, json={"data": [["a"], "b", 0.25, "hkvd"]}).json()["event_id"]
        with client.stream("GET", f"{api}/{event}") as stream:
            next(stream.iter_lines())
            assert wait_for(lambda: slow.running == 1)
        assert wait_for(lambda: slow.running == 0)  # of the minute that it would take


def test_the_page_is_built_without_a_warning(comparison):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page.application(comparison, "<b>a model</b>")


def test_shuffling_keeps_every_document_and_changes_the_order():
    texts = ["a", "b", "", "c"]
    for _ in range(20):
        order = page.shuffled(*texts)
        assert sorted(order) == sorted(texts)
        assert order[:3] != ["a", "b", "c"]
        assert order[3] == ""
    assert page.shuffled("a", "a", "") == ["a", "a", ""]
    assert page.shuffled("", "") == ["", ""]


def test_adding_shows_one_more_box_and_never_hides_one():
    for boxes, after in ((5, 6), (6, 7), (7, 8), (8, 8)):
        count, button, *shown = page.added(boxes)
        assert (count, button["interactive"]) == (after, after < 8)
        assert [update.get("visible") for update in shown] == [True] * after + [None] * (8 - after)


def test_errors_are_sentences():
    assert page.sentence(ValueError("a\n b")) == "This did not work (ValueError): a b"
    assert page.sentence(RuntimeError()) == "This did not work (RuntimeError): RuntimeError"
