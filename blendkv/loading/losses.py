"""What each level of a codec costs in quality, on a model: measured in seconds, for a loading controller."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from blendkv.codecs import Codec
from blendkv.levelkeys import id_of
from blendkv.passages import read_passages
from blendkv.trials import Trial

CONTEXT, CONTINUATION, TRIALS = 512, 64, 3


def measure_losses(
    model: Any,
    tokenizer: Any,
    codecs: Sequence[Codec],
    context: int = CONTEXT,
    continuation: int = CONTINUATION,
    trials: int = TRIALS,
) -> dict[str, float]:
    """KL divergence of the model's next tokens behind contexts that went through a codec, from those behind exact ones.

    The texts are those that come with the package, one after the other.

    Args:
        model: to measure on.
        tokenizer: its own.
        codecs: one for each level; those that need no profile lose nothing, and are left out.
        context: tokens of a context.
        continuation: tokens behind it.
        trials: contexts; fewer if there is not so much text.

    Returns:
        Nats a token, by level: `str(LevelId)`, with the profile, as that of another loses something else.

    Raises:
        ValueError: for a codec that refuses the model's layers.
    """
    lossy = [codec for codec in codecs if codec.needs_profile]
    if not lossy:
        return {}
    text = "\n\n".join(passage.text for passage in read_passages()[0])
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    length = min(context + continuation, len(ids))
    count = max(1, min(trials, len(ids) // length))
    made = [Trial.of(model, ids[i * length : (i + 1) * length], length - continuation) for i in range(count)]
    return {str(id_of(codec)): max(0.0, fmean(t.divergence(t.through(codec)) for t in made)) for codec in lossy}
