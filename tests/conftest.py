"""Fixtures: a BLENDKV_HOME of its own, uninitialised memory made visible, and tiny models."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from blendkv.attaching import attach
from blendkv.supply import DEADLINE_S
from blendkv.testing import tiny_model
from tests.patience import SLACK_S

with torch.device("meta"):  # torch notes now, and for good, which functions a device context changes: the true ones
    torch.empty(0)

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)


def pytest_collection_finish():
    """Who collects garbage looks at what tests make, not at all that was imported, which takes seconds each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def blendkv_home(tmp_path_factory):
    """Proofs remembered by one run are not seen by the next; GGUF files are converted once for an environment."""
    home = tmp_path_factory.mktemp("blendkv-home")
    environment = Path(sys.prefix)
    if sys.prefix == sys.base_prefix or not os.access(environment, os.W_OK):  # once for a run, then
        base = tmp_path_factory.getbasetemp()
        environment = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    models = environment / "blendkv" / "models"
    models.mkdir(parents=True, exist_ok=True)
    home.joinpath("models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLENDKV_HOME", str(home))
        yield home


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Where seconds are not judged, a pause of the machine is no reason to go on without a store."""
    monkeypatch.setattr("blendkv.supply.DEADLINE_S", DEADLINE_S + SLACK_S / 2)


def _poisoned(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        tensor = function(*args, **kwargs)
        if tensor.device.type != "meta" and tensor.dtype.is_floating_point:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return wrapper


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that nobody wrote is NaN, so that reading it shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@functools.cache
def _shared(attached: bool, family: str, overrides: tuple):
    model = tiny_model(family, **dict(overrides))
    return attach(model) if attached else model


@pytest.fixture
def plain():
    """`plain(family, **overrides)`: a tiny model without hooks, shared by all tests; do not change it."""
    return lambda family="llama", **overrides: _shared(False, family, tuple(sorted(overrides.items())))


@pytest.fixture
def attached():
    """`attached(family, **overrides)`: the same model with hooks, shared by all tests; do not change it."""
    return lambda family="llama", **overrides: _shared(True, family, tuple(sorted(overrides.items())))
