"""What the commands share: one JSON document or tables on stdout, and errors as one line on stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unicodedata import category

import typer

DEBUG = "BLENDKV_DEBUG"
WIDTH = 160
"""Of tables that do not go to a terminal."""
_NOT_SHOWN = ("Cc", "Cs")
_GRUMBLING = ("torchao", "torch.utils._pytree")
"""Loggers that warn, wherever torchao is installed, of parts of it that this machine cannot use."""
_ADVICE = {
    FileNotFoundError: "look at its name",
    NotADirectoryError: "look at its path",
    IsADirectoryError: "give a file",
    PermissionError: "look at its rights",
}


@contextmanager
def work(as_json: bool) -> Generator[None]:
    """Runs the body of a command: errors become one line and exit code 1; with JSON nothing else gets to stdout."""
    if os.environ.get(DEBUG) != "1":
        for name in _GRUMBLING:
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            yield
    except Exception as error:
        if _is_for_typer(error) or os.environ.get(DEBUG) == "1":
            raise
        from blendkv.errors import BlendError

        message = " ".join(_said(error).split()) or type(error).__name__
        if not isinstance(error, BlendError | OSError | ImportError | ValueError):
            message = f"{type(error).__name__}: {message} ({DEBUG}=1 shows where)"
        typer.echo(f"blendkv: {printable(message)}", err=True)
        raise typer.Exit(1) from None


def _said(error: Exception) -> str:
    """What an error says; of the system's own about a file: which file first, and what to do last."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error)
    advice = next((f"; {advice}" for kind, advice in _ADVICE.items() if isinstance(error, kind)), "")
    return f"{error.filename}: {error.strerror}{advice}"


def _is_for_typer(error: Exception) -> bool:
    return isinstance(error, typer.Exit | typer.Abort | typer.BadParameter)


def print_json(value: Any) -> None:
    """One JSON document; what JSON cannot say (NaN, infinity) is null."""
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", wrap: Sequence[str] = ()
) -> None:
    """A table: the first column and those in `wrap` are text, the others numbers; only those in `wrap` are broken."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(columns):
        text = i == 0 or name in wrap
        table.add_column(name, justify="left" if text else "right", no_wrap=name not in wrap, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)


def printable(text: str) -> str:
    """A text without what moves the cursor or colours a terminal: files of others may hold anything."""
    return "".join(c.encode("unicode_escape").decode() if category(c) in _NOT_SHOWN and c != "\n" else c for c in text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
