"""Clean environments: one has torch and what blendkv needs, the others lie over it, each with one extra more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TRIAL = Path(__file__).with_name("trial.py")


class Environment:
    """A virtual environment.

    Args:
        folder: where it is, or is made.
        below: one whose packages it sees.
    """

    def __init__(self, folder: Path, below: Environment | None = None) -> None:
        self.folder = folder
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            if below is not None:
                (self.packages / "below.pth").write_text(f"{below.packages}\n")
            self.pip("install", "--upgrade", "pip>=25.1")

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        [found] = self.folder.glob("lib/python*/site-packages")
        return found.absolute()

    def pip(self, *arguments: str | Path) -> None:
        """Runs pip; it says something only if it fails."""
        subprocess.run([self.python, "-m", "pip", "--quiet", *arguments], check=True)

    def run(self, *command: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs a program of this environment, away from the source tree, without a hub.

        Args:
            *command: a program's name and what it is given.
            timeout: most seconds.
        """
        program, *rest = command
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        settings |= {"HF_HUB_OFFLINE": "1", "BLENDKV_HOME": str(self.folder / "home"), "COLUMNS": "160"}
        return subprocess.run(
            [self.folder / "bin" / program, *rest],
            cwd=self.folder,
            env=settings,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def has(self, pattern: str) -> Sequence[str]:
        """Names of packages installed here, not below, by a pattern of file names."""
        return sorted(path.name.partition("-")[0] for path in self.packages.glob(f"{pattern}.dist-info"))


def base_of(folder: Path, torch: str, wheel: Path) -> Environment:
    """The environment below all others: torch first, so that nothing later chooses another build, then the rest."""
    made = Environment(folder)
    if not made.has("torch-*"):
        made.pip("install", torch)
    made.pip("install", wheel)
    made.pip("uninstall", "--yes", "blendkv")
    return made


def with_extra(folder: Path, base: Environment, wheel: Path, extra: str = "") -> Environment:
    """An environment with the wheel and one of its extras, and the torch of the base.

    Raises:
        RuntimeError: another torch came along.
    """
    [info] = base.packages.glob("torch-*.dist-info")
    pinned = f"torch=={info.name.removesuffix('.dist-info').partition('-')[2]}"
    made = Environment(folder, base)
    made.pip("install", "--force-reinstall", "--no-deps", wheel)
    made.pip("install", f"{wheel}[{extra}]" if extra else wheel, pinned)
    if strange := [*made.has("torch-*"), *made.has("nvidia*"), *made.has("triton-*")]:
        raise RuntimeError(f"blendkv[{extra}] brought {', '.join(strange)}: another build of torch")
    return made
