"""F25: nothing that lies in a store is ever run, however it is read, and blendkv has nothing that would run it."""

from __future__ import annotations

import ast
import io
import json
import marshal
import os
import pickle
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import blendkv
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import load_profile
from blendkv.errors import BlendError
from blendkv.stores import Pool, RemoteStore, TieredStore, open_store
from tests.drawn import profile_of
from tests.faults.entries import same
from tests.faults.rows import Result, row
from tests.faults.swaps import document
from tests.s3 import BUCKET, OPTIONS, moto
from tests.stores.servers import BINARY, Server

VARIABLE = "BLENDKV_CANARY"
"""What canaries set in the environment."""
EVENTS = ("pickle.find_class", "marshal.loads", "marshal.load", "os.system", "os.exec", "os.posix_spawn", "os.fork")
EVENTS += ("subprocess.Popen", "shelve.open", "ctypes.dlopen", "exec", "compile", "import", "code.__new__")


class Canary:
    """Sings when it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple[str, str]]:
        return os.putenv, (VARIABLE, "sang")


def payloads() -> dict[str, tuple[bytes, Callable[[bytes], Any]]]:
    """Files that run something, and who would let them."""
    plain = {f"pickle {protocol}": pickle.dumps(Canary(), protocol) for protocol in range(6)}
    found: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
        name: (data, lambda data: pickle.loads(data)) for name, data in plain.items()
    }

    def careless(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=False)

    for name, settings in (("torch.save", {}), ("torch.save, old", {"_use_new_zipfile_serialization": False})):
        file = io.BytesIO()
        torch.save({"keys": Canary()}, file, **settings)
        found[name] = (file.getvalue(), careless)
    array = np.empty(1, dtype=object)
    array[0] = Canary()
    for name, save in (("npy", np.save), ("npz", np.savez)):
        file = io.BytesIO()
        save(file, array)
        found[name] = (file.getvalue(), lambda data: opened(np.load(io.BytesIO(data), allow_pickle=True)))
    code = compile(f"import os; os.putenv({VARIABLE!r}, 'sang')", "canary", "exec")
    found["marshal"] = (marshal.dumps(code), lambda data: exec(marshal.loads(data)))
    for name, front in (("safetensors", safetensors()), ("chunk file", encode_chunk(document(0)))):
        zipped = io.BytesIO(front)  # both at once: one reads from the front, the other from the end
        with zipfile.ZipFile(zipped, "a") as archive:
            archive.writestr("archive/data.pkl", plain["pickle 2"])
            archive.writestr("archive/version", "3")
            archive.writestr("__main__.py", f"import os; os.putenv({VARIABLE!r}, 'sang')")
        found[f"{name} and zip"] = (zipped.getvalue(), careless_zip)
        found[f"{name} and pickle"] = (
            front + plain["pickle 4"],
            lambda data, front=front: pickle.loads(data[len(front) :]),
        )
        found[f"pickle and {name}"] = (plain["pickle 4"] + front, lambda data: pickle.loads(data))
    return found


def careless_zip(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return pickle.loads(archive.read("archive/data.pkl"))


def opened(loaded: Any) -> Any:
    return [loaded[name] for name in loaded.files] if hasattr(loaded, "files") else loaded


def safetensors() -> bytes:
    head = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(4)


# -- listening --------------------------------------------------------------------------------------------------------

_heard: Counter[str] | None = None
_listens = False


def _hook(event: str, args: tuple) -> None:
    if _heard is not None and (event in EVENTS or (event == "os.putenv" and VARIABLE in str(args[0]))):
        _heard[f"{event} {args[0]!r:.60}" if event in ("import", "exec", "compile", "os.putenv") else event] += 1


@contextmanager
def listening() -> Generator[Counter[str]]:
    """What the interpreter was made to do meanwhile."""
    global _heard, _listens
    if not _listens:
        sys.addaudithook(_hook)  # for good: hooks cannot be taken away
        _listens = True
    _heard = heard = Counter()
    try:
        yield heard
    finally:
        _heard = None


def sings(data: bytes, load: Callable[[bytes], Any]) -> bool:
    with listening() as heard, warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        load(data)
    return any("os.putenv" in event for event in heard)


# -- reading ----------------------------------------------------------------------------------------------------------


def backends(folder: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Every kind of store, opened by its URL."""
    yield "folder", open_store(str(folder / "plain"))
    yield "file URL", open_store(f"file://{folder}/url")
    yield "fsspec", RemoteStore("memory://canaries")
    yield "fsspec, local", open_store(f"local://{folder}/local")
    if BINARY:
        yield "Valkey", open_store(stack.enter_context(Server()).url)
    url = f"http://127.0.0.1:{stack.enter_context(moto())}"
    yield "S3", open_store(f"s3://{BUCKET}/store", endpoint_url=url, **OPTIONS)


def ask_all(result: Result, what: str, data: bytes, key: str, store: Any, path: Path) -> None:
    """Every way in which blendkv reads bytes."""
    tiers = TieredStore(Pool(1), store)
    result.expect(bool(result.call(store.put, key, data)), f"{what}: not stored")
    with listening() as heard:
        got = result.call(tiers.get, key)
    result.tried += 1
    result.expect(got is None, f"{what}: a chunk")
    result.expect(not heard, f"{what}: {dict(heard)}")
    path.write_bytes(data)
    for read in (decode_chunk, load_profile):
        with listening() as heard, suppress(BlendError, ValueError):
            read(path)
        result.tried += 1
        result.expect(not heard, f"{what}, {read.__name__}: {dict(heard)}")


@row
def f25(full: bool) -> Result:
    result = Result("F25")
    lint(result)
    loads = payloads()
    for name, (data, load) in loads.items():  # a canary that cannot sing says nothing
        result.expect(sings(data, load), f"{name} does nothing where it is let")
        result.found += 1
    good, profile = document(1), profile_of("klt")
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        path = Path(parent) / "file"
        profile.save(path)
        load_profile(path)
        for kind, store in backends(Path(parent), stack):
            tiers = TieredStore(Pool(1), store)
            key, absent = good.key, document(999).key
            result.expect(store.put(key, encode_chunk(good)), f"{kind}: not stored")
            damaged = document(2).key
            store.put(damaged, encode_chunk(good)[:-16])
            for _ in range(2):  # what is imported late is imported now
                result.found += same(tiers.get(key), good)
                tiers.get(absent)
                tiers.get(damaged)
                getattr(store, "quarantine", store.delete)(damaged)
            path.write_bytes(b"nothing")
            for read in (decode_chunk, load_profile):
                with suppress(BlendError, ValueError):
                    read(path)
            for number, (name, (data, _)) in enumerate(loads.items()):
                ask_all(result, f"{name} in {kind}", data, document(10 + number).key, store, path)
            result.expect(same(tiers.get(key), good), f"{kind}: the right entry is gone")
            store.close()
    result.figures["canaries"] = len(loads)
    return result


# -- nothing that would -----------------------------------------------------------------------------------------------

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "jit"),
    ("torch", "package"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("pd", "read_pickle"),
}


def forbidden(source: str) -> list[str]:
    """Imports and calls that may run what they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
            found += [
                f"from {node.module} import {alias.name}"
                for alias in node.names
                if ((node.module or "").partition(".")[0], alias.name) in ATTRIBUTES
            ]
        found += [f"import {name}" for name in names if name in MODULES]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            found.append(node.func.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] * ((node.value.id, node.attr) in ATTRIBUTES)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            found += [str(node.arg)] * (not isinstance(node.value, ast.Constant) or node.value.value is not False)
    return found


PROBES = (
    *("import pickle", "from marshal import loads", "import dill as d", "from torch import load", "torch.load(x)"),
    *("np.load(x)", "f(allow_pickle=True)", "f(allow_pickle=y)", "eval(x)", "exec(x)", "os.system(x)", "import shelve"),
    *("def f():\n    import joblib", "from concurrent import futures\nimport cloudpickle.cloudpickle"),
)


def lint(result: Result) -> None:
    for probe in PROBES:
        result.expect(bool(forbidden(probe)), f"the lint does not see {probe!r}")
    result.expect(not forbidden("model.eval()\ntorch.compile(f)\nre.compile(x)\nf(allow_pickle=False)"), "too strict")
    for path in sorted(Path(blendkv.__file__).parent.rglob("*.py")):
        result.tried += 1
        result.expect(not (found := forbidden(path.read_text())), f"{path.name}: {found}")
