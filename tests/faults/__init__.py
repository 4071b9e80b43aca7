"""The fault plan: engines that inject faults into stores, with CI's counts or the plan's."""

from tests.faults import disk_calls, disk_full, kills, remote, sharing  # noqa: F401  (each registers its rows)
from tests.faults.rows import ROWS, Result

__all__ = ["ROWS", "Result"]
