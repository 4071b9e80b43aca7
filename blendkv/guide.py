"""The tables of docs/guides/models.md, written from what `blendkv verify --tiny all` found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from blendkv.survey import Outcome

BEGIN, END = "<!-- {}: written by `blendkv verify --tiny all --write` -->", "<!-- end of {} -->"
STATUSES = ("proven", "refused", "wrong", "crashed")
FULL = "full prefill"
REASONS: tuple[tuple[str, str, str], ...] = (
    ("has layers of type", "layers that keep a state, a summary or a selection of tokens", FULL),
    ("is stateful", "recurrent models", FULL),
    ("caches in", "layers whose cache is not plain keys and values", FULL),
    ("num_kv_shared_layers", "layers that read the keys of another layer", FULL),
    ("cross_attention_layers", "layers that attend to images", FULL),
    ("what it caches as values moves", "multi-head latent attention", FULL),
    ("changes its frequencies", "RoPE that depends on the total length", "a fixed `rope_type`, or full prefill"),
    ("position to its embedding", "learned or sinusoidal positions", FULL),
    ("embeddings of text and images", "vision-language models", "`attach(model.get_decoder())`, its text model"),
    ("is not given input_ids", "encoders with a causal head", FULL),
    ("is an encoder-decoder", "encoder-decoders", FULL),
    ("attn_logit_softcapping", "softcap under `sdpa`, which leaves it out", '`attn_implementation="eager"`'),
    ("for every token", "arguments of layers that are not narrowed", FULL),
    ("no known rotation", "keys that move in a way nobody told us, or with a norm after the rotation", FULL),
    ("never updates its cache", "layers that take their cache under an unknown name", FULL),
    ("has no argument hidden_states", "layers that call their input otherwise", FULL),
    ("decoder layers with a layer_idx", "models whose layers do not take turns in one list", FULL),
    ("own attention mask", "models that make their masks themselves", FULL),
    ("could not be run with narrowed rows", "attention written by hand, that wants a mask of all rows", FULL),
    ("failed the proof", "whatever else blends wrongly", FULL),
)
"""Words of a refusal, what it refuses, and what to do instead; the first that fits counts."""


def kind_of(message: str) -> int:
    """The index in `REASONS` of a refusal.

    Raises:
        ValueError: for a refusal that the guide does not explain.
    """
    for i, (words, _, _) in enumerate(REASONS):
        if words in message:
            return i
    raise ValueError(f"a refusal that blendkv.guide.REASONS does not explain: {message}")


def write_guide(path: Path, version: str, outcomes: Sequence[Outcome]) -> None:
    """Puts the counts of a version into the guide, and the tables if no newer version is in it.

    Raises:
        ValueError: if the guide has no place for them.
    """
    text = path.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+\.\d[\w.]*) (\|.*)$", _block(text, "counts"), re.MULTILINE))
    rows[version] = _counts(outcomes)
    order = sorted(rows, key=Version)
    head = [
        "| transformers | tried | proven | refused | wrong | crashed | not built |",
        "|---|---|---|---|---|---|---|",
    ]
    text = _replaced(text, "counts", [*head, *(f"| {name} {rows[name]}" for name in order)])
    if version == order[-1]:
        text = _replaced(text, "families", family_table(outcomes))
        text = _replaced(text, "refusals", refusal_table(outcomes))
    path.write_text(text, encoding="utf-8")


def _counts(outcomes: Sequence[Outcome]) -> str:
    """Variants (`family+what`) are not counted: they are no families of their own."""
    found = Counter(outcome.status for outcome in outcomes if "+" not in outcome.family)
    tried = sum(found[status] for status in STATUSES)
    return "| " + " | ".join(str(n) for n in (tried, *(found[s] for s in (*STATUSES, "not built")))) + " |"


def family_table(outcomes: Sequence[Outcome]) -> list[str]:
    """One row a family."""
    lines = ["| family | status | largest error, or reason |", "|---|---|---|"]
    for outcome in outcomes:
        why = REASONS[kind_of(outcome.detail)][1] if outcome.status == "refused" else _cell(outcome.detail, 120)
        lines.append(f"| `{outcome.family}` | {outcome.status} | {why} |")
    return lines


def refusal_table(outcomes: Sequence[Outcome]) -> list[str]:
    """One row a reason, with one message word for word."""
    examples: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status == "refused":
            examples.setdefault(kind_of(outcome.detail), []).append(outcome)
    lines = ["| what is refused | families | a message | instead |", "|---|---|---|---|"]
    for i in sorted(examples):
        _, what, instead = REASONS[i]
        lines.append(f"| {what} | {len(examples[i])} | {_cell(examples[i][0].detail, 400)} | {instead} |")
    return lines


def _cell(text: str, most: int) -> str:
    text = text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    return text if len(text) <= most else text[: most - 4].rsplit(" ", 1)[0] + " ..."


def _block(text: str, name: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text.partition(begin)[2]:
        raise ValueError(f"the guide has no {begin!r} ... {end!r}")
    return text.partition(begin)[2].partition(end)[0]


def _replaced(text: str, name: str, lines: Sequence[str]) -> str:
    return text.replace(BEGIN.format(name) + _block(text, name), "\n".join([BEGIN.format(name), "", *lines, "", ""]))
