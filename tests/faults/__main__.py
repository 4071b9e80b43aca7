"""`python -m tests.faults [--rows F01,F03] [--full]`: one JSON line a row; exit code 1 if one does not hold.

`python -m tests.faults --seed N [--trace]` lives through one world of F30 again.
"""

from __future__ import annotations

import argparse
import sys

from tests.faults.plan import ROWS
from tests.faults.simulation import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="default: all")
    parser.add_argument("--full", action="store_true", help="the counts of the plan, not those of CI")
    parser.add_argument("--seed", help="of F30 alone: one seed, or a range 0:2000")
    parser.add_argument("--trace", action="store_true", help="with --seed: every event")
    args = parser.parse_args()
    if args.seed is not None:
        first, _, stop = args.seed.partition(":")
        result = simulate(range(int(first), int(stop or int(first) + 1)), print if args.trace else None)
        print(result.line())
        return 0 if result.ok else 1
    held = True
    for name in args.rows.split(","):
        result = ROWS[name.strip().upper()](args.full)
        print(result.line(), flush=True)
        held = held and result.ok
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
