"""`make mutations` breaks what is there: each text that it changes is in its file once."""

from pathlib import Path

import pytest

import blendkv
from tests.mutations import MUTATIONS, ROOT

PACKAGE = Path(blendkv.__file__).parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_is_broken_is_there(mutation):
    assert (PACKAGE / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.after != mutation.before
    for name in mutation.tests.split():
        assert (ROOT / name.partition("::")[0]).exists()
