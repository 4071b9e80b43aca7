"""`blendkv bench streaming`: policies on links that change, beside an oracle, in counted time.

What chunks weigh and cost is measured on the model (`streaming_levels`); links are scaled so that bringing the raw
keys and values takes so many times recomputing them. The policies are those of `blendkv.loading`, which run in real
time too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.oracle import best
from blendkv.bench.simulation import Outcome, simulate
from blendkv.loading.policies import Adaptive, FixedLevel, InOrder, Text
from blendkv.loading.streaming import Item, Policy

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Seconds of bringing everything raw over those of recomputing it."""
SLOS = (0.5, 1.0, 2.0)
"""Targets, in seconds of recomputing everything."""
HORIZON = 60.0
"""Targets after which a prompt is given up, which no fixed level may need."""
PIECES = 400
"""Least number of pieces that everything raw is brought in."""
MISSES, HOLDS, NEAR = 0.60, 0.08, 0.05
"""Of what is asked: where the best fixed level of no more loss misses so many, adaptive misses at most so many; and it
misses no more of all targets than the oracle and so many."""


@dataclass(frozen=True)
class Prompt:
    """What a prompt's chunks weigh and cost.

    Attributes:
        items: chunks.
        after_s: seconds from the last chunk until the first token.
        raw_bytes: of all chunks in 16 bits.
    """

    items: tuple[Item, ...]
    after_s: float
    raw_bytes: int

    @property
    def text_s(self) -> float:
        """Seconds to the first token if everything is recomputed from text."""
        return sum(item.text_s for item in self.items) + self.after_s

    @property
    def levels(self) -> list[str]:
        """Names of levels that every chunk has, the least lossy first."""
        named = [{rung.name: rung.loss for rung in item.rungs} for item in self.items]
        common = set.intersection(*map(set, named)) if named else set()
        return sorted(common, key=lambda name: named[0][name])


def streaming_rows(
    prompt: Prompt,
    sets: Mapping[str, Sequence[Bandwidth]],
    *,
    loads: Sequence[float] = LOADS,
    slos: Sequence[float] = SLOS,
    latency_s: float = 0.002,
    policies: Sequence[Policy] = (InOrder(), Adaptive()),
    about: Mapping[str, Any] | None = None,
    chosen: Callable[[tuple[str, ...]], Any] = lambda names: None,
    progress: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row for each set of links, load, target and policy.

    Args:
        prompt: what is streamed.
        sets: links of nominally 1 byte a second, by name.
        loads: seconds of bringing everything raw at the nominal rate, in seconds of recomputing everything.
        slos: targets, likewise.
        latency_s: of a request.
        policies: beside every fixed level, text and the oracle.
        about: added to every row.
        chosen: called with what the last of the policies made every chunk of, where that is more than one thing.
        progress: whether to show a bar on stderr.

    Yields:
        `traces`, `load`, `slo`, `slo_s`, `policy`, `violations` (share of links on which the target was missed), `kl`
        (mean over links of the mean over chunks; of the oracle over those that it keeps), `ttft_s` (mean) and
        `ttft_of_text` (the largest, in seconds of recomputing everything; None if it never came), `text` (share of
        chunks recomputed), `brought` (bytes over raw bytes), `switched` (loads given up, a prompt).
    """
    text_s = prompt.text_s
    piece = max(4096, min(1 << 16, prompt.raw_bytes // PIECES))
    unaware = [*(FixedLevel(level) for level in prompt.levels), Text()]
    total = sum(len(links) for links in sets.values()) * len(loads) * (len(unaware) + len(slos) * (len(policies) + 1))
    with tqdm(total=total, desc="bench streaming", unit="prompt", disable=not progress, leave=False) as bar:
        for name, nominal in sets.items():
            for load in loads:
                links = [link.scaled(prompt.raw_bytes / (load * text_s)) for link in nominal]

                def run(policy: Policy, target_s: float, links: Sequence[Bandwidth] = links) -> list[Outcome]:
                    found = []
                    for link in links:
                        found.append(
                            simulate(
                                prompt.items,
                                policy,
                                link,
                                target_s,
                                after_s=prompt.after_s,
                                latency_s=latency_s,
                                piece=piece,
                                horizon_s=HORIZON * text_s,
                            )
                        )
                        bar.update()
                    return found

                same = {policy: run(policy, text_s) for policy in unaware}  # whatever the target
                for slo in slos:
                    target_s = slo * text_s
                    outcomes = same | {policy: run(policy, target_s) for policy in policies}
                    shared = {**(about or {}), "traces": name, "load": load, "slo": slo, "slo_s": target_s}
                    for policy, found in outcomes.items():
                        yield shared | {"policy": policy.name} | _told(found, target_s, text_s, prompt.raw_bytes)
                    for one in found:  # of the last policy
                        if len(set(one.chosen)) > 1:
                            chosen(one.chosen)
                    ideal = [
                        best(prompt.items, link, target_s, after_s=prompt.after_s, latency_s=latency_s)
                        for link in links
                    ]
                    bar.update(len(links))
                    kept = [one for one in ideal if one.kept]
                    yield shared | {
                        "policy": "oracle",
                        "violations": (len(ideal) - len(kept)) / len(ideal),
                        "kl": _mean([one.loss for one in kept]),
                    }


def _told(found: Sequence[Outcome], target_s: float, text_s: float, raw_bytes: int) -> dict[str, Any]:
    came = [one for one in found if one.ttft_s < math.inf]
    return {
        "violations": sum(one.ttft_s > target_s * (1 + 1e-6) for one in found) / len(found),
        "kl": _mean([one.loss for one in came]),
        "ttft_s": _mean([one.ttft_s for one in came]),
        "ttft_of_text": max(one.ttft_s for one in found) / text_s if len(came) == len(found) else None,
        "text": _mean([sum(name == "text" for name in one.chosen) / len(one.chosen) for one in came]),
        "brought": _mean([one.brought / raw_bytes for one in found]),
        "switched": _mean([one.switched for one in found]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def checks(rows: Sequence[Mapping[str, Any]], policy: str = "adaptive") -> list[dict[str, Any]]:
    """For each set, load and target whether what is asked of a policy holds.

    Returns:
        Rows of `fixed` (the best fixed level of no more loss: the one that misses fewest) with its `fixed_violations`;
        `applies` where that is at least `MISSES`, and `holds` if the policy's is at most `HOLDS` there; `near_oracle`.
    """
    cells: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["traces"], row["load"], row["slo"]), {})[row["policy"]] = row
    found = []
    for (traces, load, slo), cell in cells.items():
        own, others = cell[policy], ("text", "oracle", "in-order", "adaptive")
        fixed = [
            row for name, row in cell.items() if name not in others and row["kl"] is not None and row["kl"] <= own["kl"]
        ]
        rival = min(fixed, key=lambda row: row["violations"], default=None)
        applies = rival is not None and rival["violations"] >= MISSES
        found.append(
            {
                "traces": traces,
                "load": load,
                "slo": slo,
                "violations": own["violations"],
                "kl": own["kl"],
                "ttft_of_text": own["ttft_of_text"],
                "fixed": None if rival is None else rival["policy"],
                "fixed_violations": None if rival is None else rival["violations"],
                "applies": applies,
                "holds": own["violations"] <= HOLDS if applies else None,
                "oracle_violations": cell["oracle"]["violations"],
                "oracle_kl": cell["oracle"]["kl"],
                "near_oracle": own["violations"] <= cell["oracle"]["violations"] + NEAR + 1e-9,
            }
        )
    return found
