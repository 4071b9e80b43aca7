"""One function for each kind of evaluation data: a `Record` in, an `Example` out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blendkv.bench.records import Example, Record, Style, cut
from blendkv.layout import split_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase | None

MUSIQUE_PASSAGES = 6
MUSIQUE_TOKENS = 500
CHUNK_TOKENS = 512
"""Of texts that are not made of passages."""
SHOTS = 10
"""Dialogues with their summaries in front of the one to summarise."""
SUMMARIES = ("gov_report", "qmsum", "multi_news", "vcsum")
"""LongBench sets whose answer is a summary."""
NEWS_SEPARATOR = "|||||"
_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_SHOT = re.compile(r"(?=^Dialogue: )", re.MULTILINE)


def hotpot(record: Record, tokenizer: Tokenizer = None) -> Example:
    """HotpotQA, distractor setting: every passage is a chunk, `title: ` + sentences + blank line.

    Sentences are joined as they are: in this data each one after the first brings its own leading space. The hub's
    layout (`context` an object of lists) is read too.
    """
    return _passages(record, "")


def two_wiki(record: Record, tokenizer: Tokenizer = None) -> Example:
    """2WikiMultihopQA: as HotpotQA, but sentences bring no spaces of their own."""
    return _passages(record, " ")


def _passages(record: Record, between: str) -> Example:
    if record.has("context") and isinstance(record.value["context"], dict):
        context = record.get("context", dict)
        titles, sentences = context.texts("title"), context.items("sentences")
        if len(titles) != len(sentences):
            raise ValueError(f"{context.place}: {len(titles)} titles, but {len(sentences)} lists of sentences")
        passages = [(title, _texts(part)) for title, part in zip(titles, sentences, strict=True)]
    else:
        passages = [(passage.text(0), passage.texts(1)) for passage in record.items("context")]
    chunks = [f"{title}: {between.join(sentences)}\n\n" for title, sentences in passages]
    support = _supporting(record, [title for title, _ in passages])
    return Example(record.text("question"), chunks, [record.text("answer")], support=support)


def musique(record: Record, tokenizer: Tokenizer = None) -> Example:
    """MuSiQue as CacheBlend sampled it: the first 6 passages, each cut at 500 tokens, + blank line."""
    if tokenizer is None:
        raise ValueError("musique cuts passages by tokens: give a tokenizer")
    passages = [passage.text("text") for passage in record.items("ctxs")[:MUSIQUE_PASSAGES]]
    chunks = [cut(passage, MUSIQUE_TOKENS, tokenizer) + "\n\n" for passage in passages]
    return Example(record.text("question"), chunks, record.texts("answers"))


def musique_original(record: Record, tokenizer: Tokenizer = None) -> Example:
    """MuSiQue as its authors publish it: every paragraph is a chunk, `title: ` + text + blank line."""
    paragraphs = record.items("paragraphs")
    chunks = [f"{p.text('title')}: {p.text('paragraph_text')}\n\n" for p in paragraphs]
    answers = [record.text("answer"), *(record.texts("answer_aliases") if record.has("answer_aliases") else [])]
    support = tuple(i for i, p in enumerate(paragraphs) if p.value.get("is_supporting"))
    return Example(record.text("question"), chunks, answers, support=support)


def longbench(record: Record, tokenizer: Tokenizer = None) -> Example:
    """A LongBench record: its `context` split at `Passage N:`, at few-shot dialogues, or every 512 tokens."""
    if tokenizer is None:
        raise ValueError("longbench cuts texts by tokens: give a tokenizer")
    context = record.text("context")
    kind = record.text("dataset") if record.has("dataset") else ""
    parts = [part for part in _PASSAGE.split(context) if part.strip()]
    style: Style = "summary" if kind.removesuffix("_e") in SUMMARIES else "qa"
    question = record.text("input")
    if kind.removesuffix("_e") == "samsum":
        parts, style = [part for part in _SHOT.split(context) if part.strip()], "dialogue"
        question = question.strip().removeprefix("Dialogue:").removesuffix("Summary:").strip()
    chunks = [f"{part.strip()}\n\n" for whole in parts for part in _pieces(tokenizer, whole)]
    return Example(question, chunks, record.texts("answers"), style)


def multi_news(record: Record, tokenizer: Tokenizer = None) -> Example:
    """MultiNews: articles between `|||||`, in chunks of at most 512 tokens, and their summary."""
    if tokenizer is None:
        raise ValueError("multinews cuts articles by tokens: give a tokenizer")
    articles = [part.strip() for part in record.text("document").split(NEWS_SEPARATOR) if part.strip()]
    chunks = [f"{piece.strip()}\n\n" for article in articles for piece in _pieces(tokenizer, article)]
    return Example("", chunks, [record.text("summary").lstrip(" -\u2013")], "summary")


def plain(record: Record, tokenizer: Tokenizer = None) -> Example:
    """One's own prompts: `question`, `chunks` (texts as they stand in the prompt) and, for F1, `answers`."""
    answers = record.texts("answers") if record.has("answers") else []
    return Example(record.text("question"), record.texts("chunks"), answers)


def samsum(records: Sequence[Record], at: int, tokenizer: Tokenizer = None) -> Example:
    """SAMSum: a dialogue to summarise after ten others with their summaries, each a chunk.

    They are of the split `train` where records say which split they are of, else the records that follow. Fields are
    `dialogue` and `summary`, or `question` and `answer`.
    """
    pool = [i for i, other in enumerate(records) if other.has("split") and other.value["split"] == "train"]
    start = at * SHOTS
    if not pool:
        pool, start = [i for i in range(len(records)) if i != at], at
    shots = [records[pool[(start + j) % len(pool)]] for j in range(min(SHOTS, len(pool)))]
    chunks = ["Dialogue: {}\nSummary: {}\n\n".format(*_dialogue(shot)) for shot in shots]
    question, summary = _dialogue(records[at])
    return Example(question, chunks, [summary], "dialogue")


def samsum_queries(records: Sequence[Record]) -> list[int]:
    """Indices of the dialogues to summarise: those of the split `test`, or all."""
    test = [i for i, record in enumerate(records) if record.has("split") and record.value["split"] == "test"]
    return test or list(range(len(records)))


def _dialogue(record: Record) -> tuple[str, str]:
    fields = ("dialogue", "summary") if record.has("dialogue") else ("question", "answer")
    said, summary = (record.text(field).replace("\r\n", "\n").strip() for field in fields)
    return said, summary


def _texts(record: Record) -> list[str]:
    return [record.text(i) for i in range(len(record.value))]


def _supporting(record: Record, titles: Sequence[str]) -> tuple[int, ...]:
    """Passages that `supporting_facts` name."""
    if not record.has("supporting_facts"):
        return ()
    facts: Any = record.value["supporting_facts"]
    named = set(facts["title"]) if isinstance(facts, dict) else {fact[0] for fact in facts}
    return tuple(i for i, title in enumerate(titles) if title in named)


def _pieces(tokenizer: Any, text: str) -> list[str]:
    return split_text(tokenizer, text.strip(), CHUNK_TOKENS)
