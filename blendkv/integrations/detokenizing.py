"""Token ids to text while they come, and where text has to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

from blendkv.layout import TOKENIZER_LOCK

HALF = "\ufffd"
"""What a tokenizer prints for bytes of a character that is not complete."""
MOST_WAITING = 4
"""Tokens after which what still looks like half a character is shown as it is: UTF-8 has no longer ones."""


class StopText:
    """Cuts a text that comes in parts in front of the first of some stop strings, and says so.

    Args:
        stops: the strings; they are not part of the text.

    Attributes:
        found: whether one of them was seen.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.found = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What may be shown now: nothing that could be the beginning of a stop string."""
        if self.found:
            return ""
        self._held += text
        at = min((i for stop in self.stops if (i := self._held.find(stop)) >= 0), default=None)
        if at is not None:
            self.found = True
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((self._overlap(stop) for stop in self.stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, when no more comes."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class AnswerStreamer(BaseStreamer):
    """Turns the ids that `generate` hands over into text, token by token.

    A few tokens before the new ones are decoded with them, so that spaces and characters of several tokens come out as
    in the whole text; half a character waits for the rest.

    Args:
        tokenizer: of the model.
        stops: strings at which the text ends.
        emit: called with each new piece of text, in the thread that generates.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], emit: Callable[[str], None]) -> None:
        self.stop = StopText(stops)
        self._tokenizer, self._emit = tokenizer, emit
        self._ids: list[int] = []
        self._window = self._read = 0
        self._is_prompt = True
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._shown)

    def put(self, value: Any) -> None:
        """Takes the prompt first, which is not shown, then `[1]` ids at a time."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += value.reshape(-1).tolist()
        before, text = self._decode(self._window, self._read), self._decode(self._window)
        if len(text) > len(before) and (not text.endswith(HALF) or len(self._ids) - self._read > MOST_WAITING):
            self._window, self._read = self._read, len(self._ids)
            self._show(self.stop.feed(text[len(before) :]))

    def end(self) -> None:
        """Shows what was held back."""
        before, text = self._decode(self._window, self._read), self._decode(self._window)
        self._show(self.stop.feed(text[len(before) :]))
        self._show(self.stop.flush())

    def _decode(self, start: int, stop: int | None = None) -> str:
        with TOKENIZER_LOCK:
            return self._tokenizer.decode(
                self._ids[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._emit(text)
