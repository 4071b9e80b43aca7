"""Samples of the fault plan's rows for Valkey; `python -m tests.faults.valkey full` runs all of them."""

import pytest

from tests.faults.valkey import ROWS


@pytest.mark.skipif(not ROWS, reason="no valkey-server or redis-server on this machine")
@pytest.mark.parametrize("row", ["F12", "F13", pytest.param("F14", marks=pytest.mark.slow), "F16"])
def test_every_fault_is_a_miss_in_time_and_reuse_comes_back(row):
    result = ROWS[row](False)
    assert result["ok"], result
    assert result["tried"] > 50
