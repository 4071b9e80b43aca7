"""All rows of the fault plan, by name. Processes that rows start import their own module alone."""

from collections.abc import Callable

from tests.faults import (  # noqa: F401  (each registers its rows)
    bombs,
    canaries,
    damage,
    disk_calls,
    disk_full,
    kills,
    privacy,
    remote,
    roads,
    sharing,
    simulation,
    soak,
    swaps,
    tenants,
    valkey,
    versions,
)
from tests.faults.rows import ROWS, Result

__all__ = ["ROWS", "Result"]


def _row(function: Callable[[bool], dict]) -> Callable[[bool], Result]:
    """A row of `valkey`, which counts in words of its own."""

    def run(full: bool) -> Result:
        told = function(full)
        failed = told.get("failed", [])
        return Result(
            row=told["row"],
            tried=told["tried"],
            wrong=told["wrong"] + len(failed) + (not told["ok"] and not failed),
            exceptions=told["exceptions"],
            max_added_s=told["max_added_s"],
            found=told["tried"],
            why=[*failed, *map(str, told.get("notes", []))],
        )

    return run


ROWS.update({name: _row(function) for name, function in valkey.ROWS.items()})
