"""What blocks of the documents need around them: servers on loopback, a profile, an address that is replaced.

A block behind a line `<!-- needs: valkey, s3 -->` is run in a world that has them: everything else in it is as written.
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:^<!-- needs: (?P<needs>.+?) -->\n+)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
BACKGROUND = """
import os
os.chdir({folder!r})
from blendkv import ChunkLibrary
from blendkv.testing import byte_tokenizer, tiny_model
model, tokenizer = tiny_model("llama", max_position_embeddings=4096), byte_tokenizer(chat=True)
documents = {documents!r}
kv = ChunkLibrary(model, tokenizer)
"""


class Block(NamedTuple):
    """A block of Python.

    Attributes:
        code: as written.
        needs: names of `NEEDS`.
    """

    code: str
    needs: tuple[str, ...]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page of docs/, in order."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found = [Block(m["code"], tuple(re.findall(r"\w+", m["needs"] or ""))) for m in BLOCK.finditer(text)]
    assert len(found) == text.count("```python"), f"{page}: a block is not at the beginning of a line"
    assert "<!-- not run" not in text, f"{page}: every block runs; say what it needs"
    return found


class World:
    """Where a page's blocks run.

    Args:
        scope: names that they know.
        folder: for files; `~` is in it.
        monkeypatch: of pytest, for the environment.
    """

    def __init__(self, scope: dict[str, Any], folder: Path, monkeypatch: Any) -> None:
        self.scope, self.folder, self.monkeypatch = scope, folder, monkeypatch
        self.instead: dict[str, str] = {"~/": f"{folder}/"}
        self.run: Callable[[str, str], None] = self._here

    def block(self, code: str, name: str) -> None:
        """Runs a block, with addresses replaced."""
        for address, ours in self.instead.items():
            code = code.replace(address, ours)
        self.run(code, name)

    def _here(self, code: str, name: str) -> None:
        exec(compile(code, name, "exec"), self.scope)

    @contextmanager
    def having(self, needs: tuple[str, ...]) -> Generator[None]:
        """With all that a block needs."""
        with ExitStack() as stack:
            for need in needs:
                stack.enter_context(NEEDS[need][0](self))
            yield


@contextmanager
def _valkey(world: World) -> Generator[None]:
    from tests.stores.servers import Server

    with Server("--user", "user", "on", ">password", "~*", "&*", "+@all") as server:
        ours = f"127.0.0.1:{server.port}"
        world.instead |= {"cache.internal:6379": ours, "cache.region:6379": ours, "centre.internal": ours}
        yield


@contextmanager
def _s3(world: World) -> Generator[None]:
    from tests.s3 import moto

    with moto() as port:
        made = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        made.request("PUT", "/bucket", headers={"Host": f"127.0.0.1:{port}"})
        assert made.getresponse().status == 200
        made.close()
        url = f"http://127.0.0.1:{port}"
        settings = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
        for name, value in (settings | {"DEFAULT_REGION": "us-east-1"}).items():
            world.monkeypatch.setenv(f"AWS_{name}", value)
        world.instead["https://s3.example.org"] = url
        yield


@contextmanager
def _gateway(world: World) -> Generator[None]:
    from blendkv.stores import DiskStore
    from tests.serving.gateways import TOKEN, gateway

    with gateway(DiskStore(world.folder / "served")) as running:
        world.monkeypatch.setenv("BLENDKV_TOKEN", TOKEN)
        world.instead["127.0.0.1:8765"] = f"127.0.0.1:{running.port}"
        yield


@contextmanager
def _profile(world: World) -> Generator[None]:
    import torch

    from blendkv.calibrating import calibrate
    from blendkv.texts import Passage

    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 384, (64,), generator=draw).tolist() for _ in range(9)]
    passages = [Passage(each, (f"{i:016x}",)) for i, each in enumerate(ids)]
    made = calibrate(world.scope["model"], passages, ["klt"], continuation=16, progress=False)
    made["klt"].save(world.folder / "profiles/klt.safetensors")
    yield


@contextmanager
def _hub(world: World) -> Generator[None]:
    """In a process of its own: huggingface_hub reads its address when it is imported."""
    from tests import hub

    def run(code: str, name: str) -> None:
        background = BACKGROUND.format(folder=str(world.folder), documents=world.scope["documents"])
        done = subprocess.run([sys.executable, "-c", background + code], env=settings, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        assert any(server.repos.values())

    with hub.running() as server:
        settings = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        settings |= {"HF_ENDPOINT": server.url, "HF_HOME": str(world.folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        settings |= {"HF_TOKEN": "hf_standin", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        world.run, before = run, world.run
        try:
            yield
        finally:
            world.run = before


@contextmanager
def _prometheus(world: World) -> Generator[None]:
    """The default registry, as it was before."""
    from prometheus_client import REGISTRY

    from blendkv import telemetry

    yield
    for told in telemetry._COLLECTORS[REGISTRY].told:
        told.close()


@contextmanager
def _opentelemetry(world: World) -> Generator[None]:
    """The global meter provider is one that drops everything, as it is until somebody sets another."""
    yield


@contextmanager
def _page(world: World) -> Generator[None]:
    from blendkv.web.running import Comparison
    from tests.web.serving import served

    comparison = Comparison(world.scope["model"], world.scope["tokenizer"], str(world.folder / "page"))
    with comparison.library, served(comparison) as address:
        world.instead["http://127.0.0.1:7860"] = address
        yield


def _has_valkey() -> bool:
    if find_spec("redis") is None:
        return False
    from tests.stores.servers import BINARY

    return BINARY is not None


NEEDS: dict[str, tuple[Callable[[World], Any], Callable[[], bool]]] = {
    "valkey": (_valkey, _has_valkey),
    "s3": (_s3, lambda: find_spec("s3fs") is not None and find_spec("moto") is not None),
    "gateway": (_gateway, lambda: all(map(find_spec, ("aiohttp", "starlette", "uvicorn", "prometheus_client")))),
    "page": (_page, lambda: find_spec("gradio") is not None),
    "profile": (_profile, lambda: True),
    "hub": (_hub, lambda: True),
    "prometheus": (_prometheus, lambda: find_spec("prometheus_client") is not None),
    "opentelemetry": (_opentelemetry, lambda: find_spec("opentelemetry") is not None),
}
"""What a block may need: how it is made, and whether it can be made here."""
