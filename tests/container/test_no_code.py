"""Nothing that is read can run."""

import ast
import io
import pickle
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import blendkv
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.errors import ChunkFileError
from tests.chunks import make_chunk

PACKAGE = Path(blendkv.__file__).parent
FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "joblib", "shelve"}
SEEN: list[str] = []
WATCHED = {"pickle.find_class", "exec", "os.system", "subprocess.Popen", "marshal.loads", "socket.bind"}
_WATCHING, _HOOKED = False, []


def _hook(event: str, args: tuple) -> None:
    if _WATCHING and event in WATCHED:
        SEEN.append(event)


@contextmanager
def watch() -> Iterator[list[str]]:
    """What Python ran meanwhile that it must not; hooks stay, so there is one."""
    global _WATCHING
    if not _HOOKED:
        sys.addaudithook(_hook)
        _HOOKED.append(True)
    SEEN.clear()
    _WATCHING = True
    try:
        yield SEEN
    finally:
        _WATCHING = False


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _zip(member: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", member)
    return file.getvalue()


def _saved(save, value) -> bytes:
    file = io.BytesIO()
    save(file, value)
    return file.getvalue()


def payloads_of(path: Path) -> dict[str, bytes]:
    canary = Canary(path)
    pickled, good = pickle.dumps(canary), encode_chunk(make_chunk())
    zipped = _zip(pickled)
    return {
        "pickle": pickled,
        "pickle 0": pickle.dumps(canary, protocol=0),
        "torch.save": _saved(lambda file, value: torch.save(value, file), canary),
        "torch.save, old": _saved(lambda f, v: torch.save(v, f, _use_new_zipfile_serialization=False), canary),
        "numpy": _saved(lambda f, v: np.save(f, np.array([v], dtype=object), allow_pickle=True), canary),
        "zip": zipped,
        "chunk file, then zip": good + zipped,
        "zip behind the magic": good[:32] + zipped,
        "pickle behind the magic": good[:8] + pickled,
        "safetensors with a pickle": (8).to_bytes(8, "little") + b'{"a": 1}' + pickled,
        "chunk file of pickles": encode_chunk(make_chunk(text=pickled.decode("latin-1")))[:-16] + pickled[:16],
    }


@pytest.mark.parametrize("how", ["bytes", "path", "file"])
def test_canaries_do_not_sing(tmp_path, how):
    canary, path = tmp_path / "canary", tmp_path / "entry"
    payloads = payloads_of(canary)
    for name, data in payloads.items():
        path.write_bytes(data)
        source = {"bytes": data, "path": path, "file": io.BytesIO(data)}[how]
        with watch() as seen, pytest.raises(ChunkFileError):
            decode_chunk(source)
        assert not canary.exists(), name
        assert not seen, name
    pickle.loads(payloads["pickle"])
    assert canary.exists()  # it would have


def test_the_watch_sees_something():
    with watch() as seen:
        pickle.loads(pickle.dumps(Path))
    assert seen == ["pickle.find_class"]


def forbidden(source: str) -> list[str]:
    """What of a file could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").split(".")[0] in FORBIDDEN or names & {"torch.load", "yaml.load", "numpy.load"}:
                found.append(node.module or "")
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.serialization.load"}:
                found.append(name)
            if name.split(".")[0] in FORBIDDEN:
                found.append(name)
        elif isinstance(node, ast.Call):
            found += [
                "allow_pickle" for k in node.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"
            ]
            if ast.unparse(node.func) in {"import_module", "__import__", "importlib.import_module"} and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and str(name.value).split(".")[0] in FORBIDDEN:
                    found.append(str(name.value))
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_package_reads_nothing_with_pickle(path):
    assert not forbidden(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, dill as d",
        "from joblib import load",
        "import torch\ntorch.load(x)",
        "from torch import load",
        "f = torch.load",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "yaml.load(f)",
        "__import__('marshal')",
        "import_module('cloudpickle.x')",
        "def f():\n    import shelve",
    ],
)
def test_the_search_finds(line):
    assert forbidden(line)
