"""How fast tokens follow the first one."""

from __future__ import annotations

import time

from torch import Tensor

from blendkv.bench.methods import Answerer


class TokenClock:
    """A streamer that notes when each new token (of every row) reached the host."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt, then with each token (on the CPU)."""
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Called by `generate` when it is done."""


def decode_rate(run: Answerer, tokens: int, batch: int = 1) -> float:
    """Tokens a second after the first one, over `tokens` more in each of `batch` rows."""
    clock = TokenClock()
    run(1 + tokens, min_new_tokens=1 + tokens, streamer=clock)
    first, last = clock.times[0], clock.times[-1]
    return batch * (len(clock.times) - 1) / (last - first)
