"""A stream of chunks in counted time: one link, one processor, and what they do when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blendkv.bench.bandwidth import Bandwidth
from blendkv.loading.streaming import Item, Policy, Stream

PIECE = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How a prompt fared.

    Attributes:
        ttft_s: until the first token; infinity if it never came.
        loss: mean over chunks.
        chosen: what each chunk was made of.
        brought: bytes that came.
        switched: loads that were given up.
        text_s: seconds of recomputing.
    """

    ttft_s: float
    loss: float
    chosen: tuple[str, ...]
    brought: int
    switched: int
    text_s: float


def simulate(
    items: Sequence[Item],
    policy: Policy,
    bandwidth: Bandwidth,
    target_s: float,
    *,
    after_s: float = 0.0,
    latency_s: float = 0.0,
    piece: int = PIECE,
    prior: float | None = None,
    horizon_s: float = math.inf,
) -> Outcome:
    """Runs a policy to its end.

    Args:
        items: chunks.
        policy: under trial.
        bandwidth: of the link, which the policy sees only by what came when.
        target_s: wanted time to the first token.
        after_s: seconds from the last chunk until it.
        latency_s: of every request.
        piece: bytes of a request.
        prior: bytes a second that the policy knows of from before.
        horizon_s: when a prompt is given up.
    """
    stream = Stream(items, policy, target_s, after_s=after_s, prior=prior)
    now, due, asked, text_s = 0.0, math.inf, 0, 0.0
    worked = math.inf
    while True:
        if due == math.inf and asked == 0 and (load := stream.load(now)) is not None:
            asked = min(piece, max(1, stream.loading_left()))
            stream.asked(now, asked)
            due = bandwidth.finish(now + latency_s, asked)
            del load
        if worked == math.inf and (work := stream.work(now)) is not None:
            seconds = items[work.item].text_s if work.rung is None else work.rung.decode_s
            text_s += seconds if work.rung is None else 0.0
            worked = now + seconds
        if stream.finished:
            return Outcome(now + after_s, stream.loss, stream.chosen, stream.brought, stream.switched, text_s)
        at = min(due, worked, stream.policy.wake(stream, now))
        if at <= now and at not in (due, worked):
            at = min(due, worked, now + 1e-4 * max(target_s, 1e-9))
        if at == math.inf or at > horizon_s:
            return Outcome(math.inf, math.inf, stream.chosen, stream.brought, stream.switched, text_s)
        now = at
        if worked <= now:
            worked = math.inf
            stream.worked(now)
        if due <= now:
            if stream.under_way is not None:
                stream.came(now, asked)
            due, asked = math.inf, 0
        elif stream.under_way is not None and not stream.still_wanted(now):
            due, asked = math.inf, 0  # a connection that is closed delivers nothing more
            stream.link.dropped(now)
