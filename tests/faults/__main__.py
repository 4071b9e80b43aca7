"""`python -m tests.faults [--rows F01,F03] [--full]`: one JSON line a row; exit code 1 if one does not hold."""

from __future__ import annotations

import argparse
import sys

from tests.faults import ROWS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="default: all")
    parser.add_argument("--full", action="store_true", help="the counts of the plan, not those of CI")
    args = parser.parse_args()
    held = True
    for name in args.rows.split(","):
        result = ROWS[name.strip().upper()](args.full)
        print(result.line(), flush=True)
        held = held and result.ok
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
