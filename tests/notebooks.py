"""Notebooks of examples/: `python -m tests.notebooks` runs each from an empty kernel, and looks at what is kept.

A cell that raises is an error, and the exit code is 1 then. Nothing is written but with `--write`, which keeps the new
outputs: pictures, tables and what was printed, but nothing that libraries say on stderr (bars, warnings of an
environment); those are made one notebook at a time, since some of them are times. `--only 02` runs one, `--jobs 2` runs
two at once, `--sample 2` runs the two whose turn it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import xxhash

os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment, whatever the user has

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "notebooks"
LIMIT = 1 << 20
"""Most bytes of a notebook."""
TIMEOUT_S = 600
"""Most seconds of a cell, on a machine that does much else."""
PLACES = re.compile(r"(?:/(?:home|Users|root|tmp|work|mnt|opt|var)/|\b[A-Z]:\\\\?\w|ipykernel_\d)[^\s'\"<]*")
"""What an output may not say: where on somebody's machine it was made."""
COLOURS = re.compile(r"\x1b\[[\d;]*m")
NOISE = ("\r", "it/s]", "B/s]", "Traceback (most", "\x1b[")


def notebooks(folder: Path = FOLDER) -> list[Path]:
    """All of them, in order."""
    return sorted(folder.glob("[0-9]*.ipynb"))


def turn(paths: list[Path], count: int, code: Path = ROOT / "blendkv") -> list[Path]:
    """So many of them; which ones follows from the library's code, so that a change of it runs others."""
    state = xxhash.xxh3_64()
    for file in sorted(code.rglob("*.py")):
        state.update(file.read_bytes())
    first = state.intdigest() % len(paths)
    return (paths[first:] + paths[:first])[:count]


def read(path: Path) -> Any:
    """A notebook that is what it should be by the format's own schema."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def digest(notebook: Any) -> str:
    """16 hex digits of all code: outputs belong to this code and to no other."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return xxhash.xxh3_64_hexdigest(json.dumps(code).encode())


def execute(path: Path, cores: int = os.cpu_count() or 1) -> Any:
    """Runs all cells from an empty kernel of this environment, in the notebook's folder, on so many cores.

    Raises:
        nbclient.exceptions.CellExecutionError: if one raises.
        nbclient.exceptions.CellTimeoutError: if one takes too long.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    client.execute(env={"OMP_NUM_THREADS": str(cores)} | os.environ | {"PYTHONPATH": places})
    return tidied(notebook)


def tidied(notebook: Any) -> Any:
    """Without what differs from run to run and tells a reader nothing; the digest of the code is noted."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _joined([out for out in cell.outputs if out.get("name") != "stderr"])
    notebook.metadata = {
        "blendkv": {"code": digest(notebook)},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """What was printed in one piece, however it came."""
    found: list[Any] = []
    for out in outputs:
        if found and out.output_type == found[-1].output_type == "stream":
            found[-1].text += out.text
        else:
            found.append(out)
    return found


def texts(cell: Any) -> Iterator[str]:
    """What a cell's outputs say in words."""
    for out in cell.outputs:
        yield out.get("text", "")
        yield from (value for kind, value in out.get("data", {}).items() if kind.startswith("text/"))


def faults(path: Path) -> list[str]:
    """What is wrong with a notebook as it is kept; one that was never run, or whose code was changed since, is."""
    notebook = read(path)
    found = [f"{path.stat().st_size:,} bytes are more than {LIMIT:,}"] if path.stat().st_size >= LIMIT else []
    if notebook.metadata.get("blendkv", {}).get("code") != digest(notebook):
        found.append("its outputs are not those of its code: make notebooks ARGS=--write")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("its cells were not run once each, in order: make notebooks ARGS=--write")
    if not any("image/png" in out.get("data", {}) for cell in code for out in cell.outputs):
        found.append("it has no picture")
    for number, cell in enumerate(code, 1):
        if any(out.output_type == "error" or out.get("name") == "stderr" for out in cell.outputs):
            found.append(f"cell {number} has an error, or what was said on stderr, among its outputs")
        for said in [*texts(cell), cell.source]:
            if place := PLACES.search(said):
                found.append(f"cell {number} tells of somebody's machine: {place[0]}")
        found += [f"cell {number} prints {noise!r}" for said in texts(cell) for noise in NOISE if noise in said]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs notebooks; 1 if one failed, or is not kept as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the new outputs")
    parser.add_argument("--only", default="", help="those whose names begin so")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="those N whose turn it is")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they are")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    options = parser.parse_args(arguments)
    there = notebooks(options.folder)
    paths = [path for path in there if path.name.startswith(options.only)]
    if not paths:
        print(f"no notebook begins with {options.only!r}; there are {', '.join(p.name for p in there)}")
        return 1
    paths = turn(paths, options.sample) if options.sample else paths
    jobs = 1 if options.write else max(1, options.jobs)

    def examine(path: Path) -> tuple[float, list[str]]:
        """Seconds, and what is wrong."""
        start = time.perf_counter()
        try:
            made = execute(path, max(1, (os.cpu_count() or 1) // jobs))
        except Exception as error:  # of a cell, a kernel that died, one that is not installed
            wrong = [f"{type(error).__name__}: {COLOURS.sub('', str(error))}"]
        else:
            if options.write:
                nbformat.write(made, path)
            wrong = faults(path)
        return time.perf_counter() - start, wrong

    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        for path, (seconds, wrong) in zip(paths, pool.map(examine, paths), strict=True):
            failed |= bool(wrong)
            print(f"{path.name:<28}{seconds:6.1f} s  {'ok' if not wrong else 'FAILED'}", flush=True)
            for what in wrong:
                print(f"  {what}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
