"""F30: simulated worlds, one a seed, where everything goes wrong at once."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults.rows import Result, row

SEEDS, ALL_SEEDS = 75, 2000


def simulate(seeds: range, trace: Callable[[str], None] | None = None) -> Result:
    """Lives through worlds; a seed that fails is named, and `--rows F30 --seed N --trace` shows what came to pass."""
    from tests.faults.world.running import live  # greenlets, which other rows do not need

    result = Result("F30")
    for seed in seeds:
        outcome = live(seed, trace)
        result.tried += outcome.faults.total()
        result.found += outcome.counts["hits"]
        for what in outcome.wrong:
            result.expect(False, f"seed {seed}: {what}")
        result.figures.update(outcome.counts)
        result.figures.update({f"fault: {kind}": count for kind, count in outcome.faults.items()})
        result.figures.update(seeds=1, events=outcome.events, turns=outcome.turns)
    result.figures = type(result.figures)(dict(sorted(result.figures.items())))
    return result


@row
def f30(full: bool) -> Result:
    return simulate(range(ALL_SEEDS if full else SEEDS))
