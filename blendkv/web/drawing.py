"""Views as HTML. Every text of a visitor or a model is escaped; nothing in it refers to another address."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from blendkv.web.running import Column, View
from blendkv.web.tokens import Picture, Section, Token

STEPS = 5
"""Colours of deviation, from none to the strongest."""
ABOUT = {
    "full recompute": "Every token is computed. What the others should say.",
    "full reuse": "Stored keys and values of every document, as they are.",
    "blend": "Stored ones, and the tokens that matter computed again.",
}
NO_ANSWER = {"running": "…", "stopped": "no answer"}
WORDS = {"waiting": "waiting", "running": "answering", "done": "done", "stopped": "stopped"}


def results(view: View) -> str:
    """The answers side by side, and the bars."""
    cards = "".join(_card(column) for column in view.columns)
    return f'<div class="bk-cards">{cards}</div>{bars(view)}'


def _card(column: Column) -> str:
    facts = []
    if column.recomputed is not None:
        facts.append(("documents computed", f"{column.recomputed:.0%}"))
    if column.kl is not None:
        facts.append(("distance (KL)", "0" if column.kl == 0 else f"{column.kl:.3f} nats"))
    if column.same is not None and column.method != "full recompute":
        facts.append(("same answer", "yes" if column.same else "no"))
    told = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    text = escape(column.text) or f'<span class="bk-quiet">{NO_ANSWER.get(column.state, "no answer yet")}</span>'
    return (
        f'<section class="bk-card bk-{column.state}" aria-label="{column.method}">'
        f'<h3>{column.method.capitalize()} <span class="bk-state">{WORDS[column.state]}</span></h3>'
        f'<p class="bk-about">{ABOUT[column.method]}</p><p class="bk-answer">{text}</p><dl>{told}</dl></section>'
    )


def bars(view: View) -> str:
    """Time to first token of each method that has one."""
    timed = [column for column in view.columns if column.ttft_s is not None]
    if not timed:
        return ""
    longest = max(column.ttft_s or 0.0 for column in timed) or 1.0
    full = view.columns[0].ttft_s
    rows = []
    for column in timed:
        seconds = column.ttft_s or 0.0
        said = f"{_seconds(seconds)}"
        if full and column is not view.columns[0]:
            said += f" · {_times(full, seconds)}"
        rows.append(
            f'<li><span class="bk-name">{column.method.capitalize()}</span><span class="bk-track" aria-hidden="true">'
            f'<span class="bk-bar" style="width:{100 * seconds / longest:.2f}%"></span></span>'
            f'<span class="bk-number">{said}</span></li>'
        )
    note = (
        f"Measured in this run, one method after the other, from {view.prompt_tokens:,} prompt tokens as text to the "
        "first token of the answer. Each method ran once before, on a short prompt, so none pays for being first; "
        "documents that were new had been computed before the clock started."
    )
    return f'<h3>Time to first token</h3><ol class="bk-bars">{"".join(rows)}</ol><p class="bk-about">{note}</p>'


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _times(full: float, seconds: float) -> str:
    ratio = full / seconds if seconds else math.inf
    return f"{ratio:.1f}x sooner" if ratio >= 1 else f"{1 / ratio:.1f}x later"


def picture(view: View) -> str:
    """The prompt's tokens, coloured and outlined, with a legend in front."""
    drawn = view.picture
    if drawn is None:
        return ""
    parts = "".join(_section(section, drawn.top) for section in drawn.sections)
    return f'{_legend(drawn)}<div class="bk-prompt" tabindex="0" role="region" aria-label="The prompt">{parts}</div>'


def _legend(drawn: Picture) -> str:
    edges = [drawn.top * step / STEPS for step in range(STEPS + 1)]
    ends = [f" to {edge:.2f}" for edge in edges[1:-1]] + [" or more"]
    swatches = "".join(
        f'<span class="bk-swatch bk-d{step}">{edges[step]:.2f}{end}</span>' for step, end in enumerate(ends)
    )
    said = f"{drawn.recomputed:,} of {drawn.stored:,} stored tokens were recomputed"
    if not math.isnan(drawn.held):
        said += f"; they hold {drawn.held:.0%} of the squared deviation"
    return (
        f'<p>{said}.</p><div class="bk-legend"><span>Deviation of stored keys and values:</span>{swatches}'
        '<span class="bk-key"><span class="bk-swatch bk-out">outlined</span> recomputed by the blend</span>'
        '<span class="bk-key"><span class="bk-swatch bk-fresh">dotted</span> not stored, always computed</span></div>'
    )


def _section(section: Section, top: float) -> str:
    tokens = "".join(_token(token, top) for token in section.tokens).rstrip("\n")
    return f'<section><h4>{escape(section.title)}</h4><p class="bk-tokens">{tokens}</p></section>'


def _token(token: Token, top: float) -> str:
    text = escape(token.text).replace("\n", "↵\n") if token.text.strip("\n") else "↵" * len(token.text)
    if token.deviation is None:
        return f'<span class="bk-fresh">{text}</span>'
    classes = f"bk-d{step_of(token.deviation, top)}{' bk-out' if token.recomputed else ''}"
    told = f"deviation {token.deviation:.3f}{', recomputed' if token.recomputed else ''}"
    tag = "mark" if token.recomputed else "span"
    return f'<{tag} class="{classes}" title="{told}">{text}</{tag}>'


def step_of(deviation: float, top: float) -> int:
    """Which of the colours a deviation has."""
    return min(STEPS - 1, int(STEPS * deviation / top)) if top > 0 else 0


def origins(view: View) -> str:
    """Where keys and values came from: before the clock started, and in the blend."""
    if view.prepared is None or view.report is None:
        return ""
    report, prepared = view.report, view.prepared
    last = report.layers[-1]
    before = [(tier_name(tier, prepared.device), tokens) for tier, tokens in sorted(prepared.loaded.items())]
    if prepared.computed:
        before.append(("Computed now, and kept", prepared.computed))
    blend = [
        ("Reused as stored", last.reused),
        ("Recomputed by the blend", last.recomputed),
        ("Computed: question and template", last.fresh),
    ]
    if last.missed:
        blend.append(("Computed: not found in the store", last.missed))
    seconds = ", ".join(f"{stage} {_seconds(s)}" for stage, s in report.seconds.items() if s >= 5e-4)
    return (
        f"{_table(f'Where the chunks were ({_seconds(prepared.seconds)})', before)}"
        f"{_table(f'What the blend did with the prompt ({report.selector})', blend)}"
        f'<p class="bk-about">Tokens of the last layer; a document that stands twice in the prompt is loaded once. The '
        f"blend placed {report.chunk_bytes / 2**20:,.1f} MiB; its time: {escape(seconds)}.</p>"
        f"<details><summary>The whole report</summary><pre>{escape(str(report))}</pre></details>"
    )


def _table(title: str, rows: Iterable[tuple[str, int]]) -> str:
    rows = list(rows)
    total = sum(tokens for _, tokens in rows)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{tokens:,}</td><td>{tokens / max(1, total):.0%}</td></tr>'
        for name, tokens in rows
    )
    return (
        f'<table class="bk-table"><caption>{escape(title)}</caption><thead><tr><th scope="col">from</th>'
        f'<th scope="col">tokens</th><th scope="col">share</th></tr></thead><tbody>{body}</tbody></table>'
    )


def tier_name(tier: str, device: str) -> str:
    """What a tier is called: memory, and of what; a folder; or the kind of server."""
    if tier == "memory":
        return "Memory of the GPU" if device == "cuda" else "Main memory (RAM)"
    scheme = tier.partition("://")[0]
    known = {"file": "Disk", "redis": "Valkey or Redis", "valkey": "Valkey or Redis", "http": "Gateway", "s3": "S3"}
    return known.get(scheme.removesuffix("s") if scheme in ("rediss", "valkeys", "https") else scheme, scheme)


def status(sentence: str, *, error: bool = False) -> str:
    """One sentence on what is going on, or on what was wrong."""
    return f'<p class="{"bk-error" if error else "bk-status"}">{escape(sentence)}</p>'
