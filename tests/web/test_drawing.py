"""HTML of views: what is in it, that texts cannot break out of it, and that its colours can be told apart."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.resources import files

import pytest

from blendkv.report import BlendReport, LayerRows
from blendkv.web import drawing
from blendkv.web.running import METHODS, Column, Prepared, View
from blendkv.web.tokens import Picture, Section, Token

NASTY = "</p></section><script>alert(1)</script><img src=x onerror=alert(2)>\" onclick='x' & {{1}} ${2}"
CSS = files("blendkv.web").joinpath("page.css").read_text()


def view(text: str = "an answer") -> View:
    columns = (
        Column(METHODS[0], "done", text, 2.0, 1.0, 0.0, True),
        Column(METHODS[1], "done", text, 0.05, 0.0, 0.3, False),
        Column(METHODS[2], "done", text, 0.5, 0.15, 0.08, True),
    )
    tokens = (Token(text, 0.0), Token(text, 0.55, True), Token("\n", None), Token(text, None))
    picture = Picture((Section(text, "document", tokens),), 0.5, 1, 2, 0.75)
    report = BlendReport(tokens=4, layers=[LayerRows(1, 1, 2, 0)], selector=text, chunk_bytes=2**20)
    report.loaded = {text: 3}
    report.notes.append(text)
    prepared = Prepared({"memory": 3, "file:///somewhere/else": 5, text: 1}, 7, 0.25, "cpu")
    return View("Done", columns, 4, prepared, report, picture, True)


def drawn(shown: View) -> str:
    parts = (drawing.results(shown), drawing.picture(shown), drawing.origins(shown), drawing.status(shown.doing))
    return f"<div>{''.join(parts)}</div>"


def words(shown: str) -> str:
    return re.sub(r"\s+", " ", " ".join(ET.fromstring(shown).itertext()))


def test_it_is_well_formed_and_refers_to_nothing():
    shown = drawn(view())
    ET.fromstring(shown)
    assert not re.search(r"https?:|//|src=|href=|url\(|@import", shown + CSS.partition("*/")[2])


def test_texts_are_texts():
    """Whatever is written, elements and attributes are those of a harmless text."""
    shown, plain = drawn(view(NASTY)), drawn(view("an answer"))
    tags = [(e.tag, sorted(e.attrib)) for e in ET.fromstring(shown).iter()]
    assert tags == [(e.tag, sorted(e.attrib)) for e in ET.fromstring(plain).iter()]
    assert words(shown).count("<script>alert(1)</script>") == words(plain).count("an answer") > 5
    error = drawing.status(NASTY, error=True)
    assert [e.tag for e in ET.fromstring(error).iter()] == ["p"]


def test_bars_have_numbers_and_are_in_proportion():
    shown = drawing.bars(view())
    assert re.findall(r"width:([\d.]+)%", shown) == ["100.00", "2.50", "25.00"]
    assert [t.strip() for t in re.findall(r'bk-number">([^<]*)', shown)] == [
        "2.00 s", "50 ms · 40.0x sooner", "500 ms · 4.0x sooner",
    ]  # fmt: skip
    slow = view().with_column(2, ttft_s=4.0)
    assert "4.00 s · 2.0x later" in drawing.bars(slow)
    assert "4 prompt tokens" in shown
    assert "ran once before" in shown


def test_bars_come_as_they_are_measured():
    assert drawing.bars(View("")) == ""
    started = View("").with_column(0, ttft_s=1.5)
    assert drawing.bars(started).count("<li>") == 1


def test_cards_say_what_is_known():
    shown = words(f"<div>{drawing.results(view())}</div>")
    for said in ("Full recompute done", "documents computed 15%", "0.080 nats", "0.300 nats", "same answer no"):
        assert said in shown
    waiting = words(f"<div>{drawing.results(View(''))}</div>")
    assert waiting.count("waiting") == waiting.count("no answer yet") == 3
    stopped = words(f"<div>{drawing.results(View('').with_column(0, state='stopped'))}</div>")
    assert (stopped.count("no answer"), stopped.count("no answer yet")) == (3, 2)
    assert "KL" not in waiting


def test_recomputed_tokens_are_marked_by_more_than_colour():
    shown = drawing.picture(view())
    assert shown.count("<mark ") == 1
    assert 'class="bk-d4 bk-out" title="deviation 0.550, recomputed"' in shown
    assert re.search(r"\.bk-out \{ outline: [\d.]+px solid", CSS)
    assert "1 of 2 stored tokens were recomputed; they hold 75% of the squared deviation" in shown
    for said in ("0.00 to 0.10", "0.40 or more", "outlined", "recomputed by the blend", "always computed"):
        assert said in shown


def test_a_sign_stays_beside_its_meaning():
    """Both in one element, which no line is broken in."""
    shown = ET.fromstring(f"<div>{drawing.picture(view())}</div>")
    keys = ["".join(e.itertext()) for e in shown.iter("span") if e.get("class") == "bk-key"]
    assert keys == ["outlined recomputed by the blend", "dotted not stored, always computed"]
    assert ".bk-key { white-space: nowrap; }" in CSS


def test_lines_run_as_their_script_does():
    rule = re.search(r"\.bk-answer, \.bk-tokens \{([^}]*)\}", CSS)
    assert "unicode-bidi: plaintext" in rule[1]


@pytest.mark.parametrize(("deviation", "step"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.39, 3), (0.41, 4), (9.0, 4)])
def test_steps(deviation, step):
    assert drawing.step_of(deviation, 0.5) == step
    assert drawing.step_of(deviation, 0.0) == 0


def test_line_ends_show():
    tokens = (Token("a\nb", 0.0), Token("\n\n", None))
    shown = drawing.picture(replace(view(), picture=Picture((Section("t", "document", tokens),), 1.0, 0, 1, 0.0)))
    assert "a↵\nb" in shown
    assert ">↵↵</span></p>" in shown


def test_origins():
    shown = words(f"<div>{drawing.origins(view())}</div>")
    for said in ("Main memory (RAM) 3 19%", "Disk 5 31%", "Computed now, and kept 7 44%", "Reused as stored 1 25%"):
        assert said in shown
    assert "not found in the store" not in shown
    assert "The blend placed 1.0 MiB" in shown
    assert drawing.origins(View("")) == ""


@pytest.mark.parametrize(
    ("tier", "device", "name"),
    [
        ("memory", "cpu", "Main memory (RAM)"),
        ("memory", "cuda", "Memory of the GPU"),
        ("file:///a/b", "cpu", "Disk"),
        ("rediss://host", "cpu", "Valkey or Redis"),
        ("https://host/chunks", "cpu", "Gateway"),
        ("s3://bucket", "cpu", "S3"),
        ("gs://bucket", "cpu", "gs"),
    ],
)
def test_tiers_have_names(tier, device, name):
    assert drawing.tier_name(tier, device) == name


# -- colours ----------------------------------------------------------------------------------------------------------


def colours(block: str) -> dict[str, str]:
    found = re.search(rf"^{re.escape(block)} \{{(.*?)\}}", CSS, re.DOTALL | re.MULTILINE)
    return dict(re.findall(r"--bk-(\S+): (#[0-9a-f]{6});", found[1]))


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("block", [":root", ".dark"])
def test_contrasts(block):
    c = colours(block)
    assert contrast("#ffffff", "#777777") == pytest.approx(4.48, abs=0.01)
    texts = [(c[f"t{i}"], c[f"d{i}"]) for i in range(drawing.STEPS)]
    texts += [(c["ink"], c["paper"]), (c["quiet"], c["paper"]), (c["error-ink"], c["error-paper"])]
    assert [pair for pair in texts if contrast(*pair) < 4.5] == []
    assert contrast(c["bar"], c["track"]) >= 3
    assert contrast(c["ring"], c["paper"]) >= 3
    steps = [luminance(c[f"d{i}"]) for i in range(drawing.STEPS)]
    assert steps == sorted(steps, reverse=block == ":root"), "an order that shows in grey, too"
    assert all(contrast(c[f"d{i}"], c[f"d{i + 1}"]) > 1.1 for i in range(drawing.STEPS - 1))
