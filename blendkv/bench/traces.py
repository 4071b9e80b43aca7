"""Requests of chunks that repeat as a Zipf law says, for `blendkv bench eviction`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
"""Of Llama-3.1-8B in bfloat16: layers, keys and values, heads, head dim, bytes. Policies do not see the unit."""
SHORTEST, LONGEST = 64, 2048
"""Tokens of a document's chunk."""
_TYPICAL, _SPREAD = 400, 0.8
"""Median of the log-normal law of tokens before it is cut off, and its standard deviation in log tokens."""


class Trace(NamedTuple):
    """Who is asked for, in order.

    Attributes:
        requests: [R] numbers of documents.
        sizes: [D] bytes of each document's chunk.
    """

    requests: np.ndarray
    sizes: np.ndarray


def zipf_trace(s: float, drift: bool, documents: int, requests: int, seed: int) -> Trace:
    """Independent requests; the document of rank r is asked for in proportion to r ** -s, whatever its size.

    Args:
        s: of the Zipf law.
        drift: half way ranks are drawn anew, so that what was popular no longer is.
        documents: D.
        requests: R.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.rint(rng.lognormal(np.log(_TYPICAL), _SPREAD, documents)), SHORTEST, LONGEST)
    share = np.arange(1, documents + 1, dtype=float) ** -s
    ranks = rng.choice(documents, size=requests, p=share / share.sum())
    first, second = rng.permutation(documents), rng.permutation(documents)
    asked = first[ranks]
    if drift:
        asked[requests // 2 :] = second[ranks[requests // 2 :]]
    return Trace(asked, tokens.astype(np.int64) * BYTES_PER_TOKEN)


def next_requests(requests: np.ndarray) -> np.ndarray:
    """[R] when the document of each request is asked for again; R if never."""
    after = np.full(len(requests), len(requests))
    order = np.argsort(requests, kind="stable")
    same = requests[order[1:]] == requests[order[:-1]]
    after[order[:-1][same]] = order[1:][same]
    return after
