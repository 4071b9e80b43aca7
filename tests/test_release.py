"""What would be published: the wheel's contents, what it says where a package is missing; more: `make dist-test`."""

import subprocess
import sys
import tomllib

import pytest

from tests.release import artifacts
from tests.release.trial import EXTRAS, NO_EXTRA

PROJECT = tomllib.loads((artifacts.ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return artifacts.build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_the_package_and_nothing_else(built):
    assert artifacts.check_wheel(built[0]) == []
    assert {"blendkv/py.typed", "blendkv/data/rans.json"} <= artifacts.package_files()


def test_the_sdist_is_enough_to_test_and_to_build_the_documents(built):
    assert artifacts.check_sdist(built[1]) == []


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    again, _ = artifacts.build(tmp_path / "again", artifacts.unpack(built[1], tmp_path))
    assert artifacts.same(built[0], again)


def test_the_version_is_in_one_place():
    """Nothing but `_version.py` says it to the build."""
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT


def test_every_extra_is_tried():
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_without_any_extra_everything_says_what_is_missing():
    """In a process of its own, in which no package of an extra can be imported."""
    hidden = [*NO_EXTRA, *(package for extra in EXTRAS.values() for package in extra.packages)]
    trial = artifacts.ROOT / "tests/release/trial.py"
    done = subprocess.run([sys.executable, trial, "--hide", *hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(extra in done.stdout for extra in EXTRAS)
