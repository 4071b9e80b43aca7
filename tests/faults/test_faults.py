"""CI's samples of the fault plan; `make faults` runs the full counts."""

import os

import pytest

from tests.faults.plan import ROWS
from tests.faults.rows import Result

SLOW = {"F01", "F05", "F06", "F13", "F14", "F17", "F18", "F19", "F21", "F22", "F25", "F26", "F30", "F32"}


@pytest.mark.skipif(os.name != "posix", reason="stores in folders are for POSIX systems")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ROWS])
def test_row(name):
    result = ROWS[name](False)
    assert result.ok, result.line()
    assert result.row == name


def test_a_row_cannot_pass_by_doing_nothing():
    assert not Result("F00").ok
    assert not Result("F00", tried=5).ok
    assert Result("F00", tried=5, found=1).ok
    assert not Result("F00", tried=5, found=1, wrong=1).ok
    assert not Result("F00", tried=5, found=1, exceptions=1).ok
