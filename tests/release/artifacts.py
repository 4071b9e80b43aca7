"""What must be in a wheel and an sdist, and nothing else."""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from email.parser import HeaderParser
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
SDIST = (
    "blendkv/__init__.py", "tests/conftest.py", "examples", "docs/index.md", "docs/assets/reuse.svg", "mkdocs.yml",
    "Makefile", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE",
)  # fmt: skip
"""Some of what an sdist has: one can test, and build the documents, from it."""


def build(out: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """Wheel and sdist of a source tree, by its build backend.

    Args:
        out: folder for them.
        source: the tree.
    """
    from hatchling import build as backend

    out, before = out.absolute(), Path.cwd()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(source)
    try:
        return out / backend.build_wheel(str(out)), out / backend.build_sdist(str(out))
    finally:
        os.chdir(before)


def package_files() -> set[str]:
    """Files of the package in the working tree: modules, data, py.typed."""
    files = (path for path in (ROOT / "blendkv").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def version() -> str:
    """Of the source, read without importing it."""
    [found] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "blendkv/_version.py").read_text(), flags=re.MULTILINE)
    return found


def check_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        info = f"blendkv-{version()}.dist-info"
        said = HeaderParser().parsestr(wheel.read(f"{info}/METADATA").decode())
    ours = {name for name in names if not name.startswith(f"{info}/")}
    wrong = [f"the wheel lacks {name}" for name in sorted(package_files() - ours)]
    wrong += [f"the wheel has {name}" for name in sorted(ours - package_files())]
    needed = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    wrong += [f"the wheel lacks {name}" for name in sorted(needed - {n.removeprefix(f"{info}/") for n in names})]
    if said["Version"] != version():
        wrong.append(f"the wheel is of version {said['Version']}, not {version()}")
    wrong += [f"no {name} is in its metadata" for name in ("License-Expression", "Summary") if not said[name]]
    urls = [url for url in said.get_all("Project-URL") or () if "example" in url or "TODO" in url]
    return wrong + [f"{url} is no place" for url in urls]


def check_sdist(path: Path) -> list[str]:
    """What is wrong with an sdist."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {str(parent) for name in names for parent in Path(name).parents}
    lacking = sorted((package_files() | set(SDIST)) - names - folders)
    unwanted = re.compile(r"\.pyc$|(^|/)\.(cache|venv|git/|hypothesis)|^(site|dist)/")
    stray = sorted(name for name in names if unwanted.search(name))
    return [f"the sdist lacks {name}" for name in lacking] + [f"the sdist has {name}" for name in stray]


def unpack(sdist: Path, into: Path) -> Path:
    """The source tree in an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    return into / sdist.name.removesuffix(".tar.gz")


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes."""
    return sha256(one.read_bytes()).digest() == sha256(other.read_bytes()).digest()
