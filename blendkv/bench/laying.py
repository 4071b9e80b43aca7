"""An example laid out as a prompt: head, chunks, what asks. Pieces are tokenised alone, their ids concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from blendkv.bench.methods import Case
from blendkv.bench.records import Example
from blendkv.layout import Layout, begins_with_bos, encode

INSTRUCTIONS = {
    "qa": "Answer the question using the passages below.",
    "summary": "Summarize the passages below in a few sentences.",
    "dialogue": "Summarize the dialogue into a few short sentences. The following are some examples.",
}
ASKING = {
    "qa": "Question: {question}\nAnswer within 5 words.",
    "summary": "{question}\nSummary:",
    "dialogue": "Dialogue: {question}\nSummary:",
}
"""What stands after the chunks, by style."""
CHAT = (
    "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n",
    "{asking}<|im_end|>\n<|im_start|>assistant\n",
)
"""Text before the chunks (a piece of its own, exact) and after them (always computed), where the model knows ChatML."""
PLAIN = ("{instruction}\n\n", "{asking}")
"""The same for models without any chat template; a question is followed by a line `Answer:`."""


@dataclass(frozen=True)
class Cell:
    """How the chunks of a prompt are changed before it is laid out: one point of a sweep.

    Attributes:
        chunks: how many passages are kept, those that the answer needs first, in their order; None keeps all.
        chunk_tokens: their ids are joined and cut anew every so many tokens; None leaves the passages as chunks.
        batch: how many times the prompt is answered at once when time is measured.
    """

    chunks: int | None = None
    chunk_tokens: int | None = None
    batch: int = 1


def frame(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """Ids of what stands before the chunks of an example, and of what stands after them."""
    instruction = INSTRUCTIONS[example.style]
    asking = ASKING[example.style].format(question=example.question).lstrip("\n")
    if "<|im_start|>" not in tokenizer.get_vocab() and getattr(tokenizer, "chat_template", None) is not None:
        pieces = Layout(tokenizer, 1, "").assemble([], asking, instruction).pieces
        head = [token for piece in pieces if piece.kind == "head" for token in piece.ids]
        return head, [token for piece in pieces if piece.kind != "head" for token in piece.ids]
    chat = "<|im_start|>" in tokenizer.get_vocab()
    before, after = CHAT if chat else PLAIN
    if not chat and example.style == "qa":
        after += "\nAnswer:"
    head = _special(tokenizer, before.format(instruction=instruction))
    if begins_with_bos(tokenizer):
        head = [tokenizer.bos_token_id, *head]
    return head, _special(tokenizer, after.format(asking=asking))


def lay_out(model: PreTrainedModel, tokenizer: Any, example: Example, cell: Cell | None = None) -> Case:
    """The prompt of the protocol: head and chunks, each tokenised and computed alone, then the question."""
    cell = cell or Cell()
    head, asking = frame(tokenizer, example)
    pieces = [piece for piece in (head, *cut_pieces(tokenizer, example, cell)) if piece]
    return Case.of(model, pieces, asking)


def cut_pieces(tokenizer: Any, example: Example, cell: Cell) -> list[list[int]]:
    """Ids of the chunks of an example in a cell of a sweep."""
    pieces = [encode(tokenizer, example.chunks[i]) for i in kept(example, cell.chunks)]
    if cell.chunk_tokens is None:
        return pieces
    joined = [token for piece in pieces for token in piece]
    return [joined[i : i + cell.chunk_tokens] for i in range(0, len(joined), cell.chunk_tokens)]


def kept(example: Example, chunks: int | None) -> Sequence[int]:
    """Indices of the passages that stay: those that the answer needs, then the first of the others; in order."""
    everything = range(len(example.chunks))
    if chunks is None or chunks >= len(everything):
        return everything
    order = sorted(everything, key=lambda i: i not in example.support)
    return sorted(order[:chunks])


def sweep(chunks: Sequence[int], chunk_tokens: Sequence[int], batches: Sequence[int] = (1,)) -> Iterator[Cell]:
    """Every combination; an empty list leaves that side as it is."""
    for count in chunks or (None,):
        for tokens in chunk_tokens or (None,):
            for batch in batches or (1,):
                yield Cell(count, tokens, batch)


def _special(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text whose special tokens are meant."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]
