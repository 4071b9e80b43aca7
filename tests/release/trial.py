"""Run inside an environment: is every module importable, and does what is missing say which command brings it?

`python trial.py [--hide PACKAGE ...]` imports nothing of the tests. It prints one line for each thing that is wrong,
and ends with 1 if there was one. `--hide` makes packages look as if they were not installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Extra:
    """What an extra brings.

    Attributes:
        packages: as they are imported; the extra is there if all of them are.
        modules: that cannot be imported without it, and say so in one sentence.
        inner: that cannot either, and are imported by those alone.
        commands: that need it; without it they end with 1 and one line. `{tmp}` is a folder.
        some: by command, the packages that it needs, where those are not all: another extra may bring them.
    """

    packages: tuple[str, ...]
    modules: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    some: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def lacks(self, command: str) -> bool:
        """Whether a package is not there that a command needs."""
        return any(find_spec(package) is None for package in self.some.get(command, self.packages))


KEY = "ab" * 32
ROW = {"device": "", "method": "reuse", "selector": None, "ratio": None, "tokens": 9, "ttft_s": 1.0, "speedup": 2.0}
PLOT = "bench plot {tmp}/rows.json --out {tmp}/rows.svg"
SERVE, INSPECT = "serve --store {tmp}/chunks", f"inspect {KEY} --store http://127.0.0.1:9/chunks"
EXTRAS = {
    "bench": Extra(("matplotlib", "zstandard"), commands=(PLOT,), some={PLOT: ("matplotlib",)}),
    "demo": Extra(("gguf",)),
    "docs": Extra(("mkdocs", "material", "mkdocstrings")),
    "flash": Extra(("flash_attn",)),
    "haystack": Extra(("haystack",), ("integrations.haystack",)),
    "langchain": Extra(
        ("langchain_core",),
        ("integrations.langchain",),
        ("integrations.langchain_chat", "integrations.langchain_messages", "integrations.langchain_retriever"),
    ),
    "llama-index": Extra(("llama_index",), ("integrations.llama_index",)),
    "notebooks": Extra(("gguf", "ipykernel", "langchain_core", "matplotlib")),
    "redis": Extra(
        ("redis",),
        ("stores.valkey", "stores.valkey_centre"),
        ("stores.resp", "stores.valkey_server", "stores.valkey_servers", "stores.valkey_url"),
        ("ls redis://127.0.0.1:9", "evict --store valkey://127.0.0.1:9 --dry-run --older-than 1d"),
    ),
    "s3": Extra(("s3fs",), commands=("ls s3://bucket/chunks",)),
    "serve": Extra(
        ("aiohttp", "httptools", "prometheus_client", "starlette", "uvicorn"),
        ("stores.http",),
        tuple(f"serving.{name}" for name in ("app", "central", "chunks", "metrics", "protocol", "server")),
        (SERVE, INSPECT),
        {SERVE: ("httptools", "prometheus_client", "starlette", "uvicorn"), INSPECT: ("aiohttp",)},
    ),
    "telemetry": Extra(("opentelemetry", "prometheus_client")),
    "web": Extra(("gradio",), inner=("web.page", "web.server"), commands=("demo --web --port 0",)),
}
"""The extras of pyproject.toml."""
NO_EXTRA = {"triton": tuple(f"kernels.{name}" for name in ("attention", "klt", "mass", "placing", "rans", "rows"))}
"""What comes with a torch for CUDA: modules that nothing imports where it is not installed."""


def there(extra: str) -> bool:
    """Whether all packages of an extra can be imported."""
    return all(find_spec(package) is not None for package in EXTRAS[extra].packages)


def modules() -> list[str]:
    """Every module of blendkv, without the package's name; none that is run by being imported."""
    package = importlib.import_module("blendkv")
    found = [module.name for module in pkgutil.walk_packages(package.__path__, "blendkv.")]
    return [name.removeprefix("blendkv.") for name in found if not name.endswith("__main__")]


def import_all() -> list[str]:
    """What went wrong in importing everything: only what an extra brings may fail, and only without it."""
    needs = {name: extra for extra, said in EXTRAS.items() for name in (*said.modules, *said.inner)}
    free = {name: package for package, names in NO_EXTRA.items() for name in names}
    wrong = []
    for name in modules():
        try:
            importlib.import_module(f"blendkv.{name}")
        except ImportError as error:
            if name in free and find_spec(free[name]) is None:
                continue
            extra = needs.get(name)
            if extra is None or there(extra):
                wrong.append(f"import blendkv.{name}: {error}")
            elif name in EXTRAS[extra].modules:
                wrong += judge(f"import blendkv.{name}", f"{type(error).__name__}: {error}", extra)
    return wrong


def judge(what: str, said: str, extra: str) -> list[str]:
    """What is wrong with what was said of a missing extra: it is one line that ends with the command."""
    good = len(said.strip().splitlines()) == 1 and said.strip().endswith(f"pip install 'blendkv[{extra}]'")
    return [] if good else [f"{what}: without {extra} it says {said.strip()!r}"]


def run_commands() -> list[str]:
    """What went wrong in the commands of every extra that is not there."""
    from typer.testing import CliRunner

    from blendkv.cli import main

    wrong = []
    with TemporaryDirectory() as folder:
        (Path(folder) / "rows.json").write_text(json.dumps({"rows": [ROW]}))
        for extra, about in EXTRAS.items():
            for command in filter(about.lacks, about.commands):
                done = CliRunner().invoke(main, [word.format(tmp=folder) for word in command.split()])
                if done.exit_code != 1 or done.stdout:
                    wrong.append(f"blendkv {command}: exit code {done.exit_code}, {done.output.strip()!r}")
                else:
                    wrong += judge(f"blendkv {command}", done.stderr, extra)
    return wrong


def load_bundled() -> list[str]:
    """What went wrong in loading a model from a GGUF file without the package that reads it."""
    if there("demo"):
        return []
    from blendkv import load_model

    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(b"GGUF")
        try:
            load_model(str(path))
        except ModuleNotFoundError as error:
            return judge("load_model", str(error), "demo")
        return ["load_model: a GGUF file without gguf is no error"]


def count() -> list[str]:
    """What went wrong in asking for counters without the packages that take them."""
    from types import SimpleNamespace

    from blendkv import Pool, telemetry

    library, wrong = SimpleNamespace(pool=Pool(), on_report=lambda listener: lambda: None), []
    for package, call in (("prometheus_client", telemetry.prometheus), ("opentelemetry", telemetry.opentelemetry)):
        if find_spec(package) is None:
            try:
                call(library)  # type: ignore[arg-type]  # as much of a library as it takes
            except ModuleNotFoundError as error:
                wrong += judge(f"telemetry.{call.__name__}", str(error), "telemetry")
            else:
                wrong.append(f"telemetry.{call.__name__}: no error without {package}")
    return wrong


def main() -> int:
    """Prints what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hide", nargs="*", default=[], help="packages to be treated as not installed")
    parser.add_argument("--extra", help="one that must be there")
    given = parser.parse_args()
    sys.modules.update(dict.fromkeys(given.hide))  # what is None there cannot be imported
    wrong = import_all() + run_commands() + load_bundled() + count()
    if given.extra and not there(given.extra):
        wrong.append(f"blendkv[{given.extra}] does not bring {', '.join(EXTRAS[given.extra].packages)}")
    print("\n".join(wrong) or f"{len(modules())} modules; without: {', '.join(e for e in EXTRAS if not there(e))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
