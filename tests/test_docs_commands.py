"""Every `blendkv` command line in the documents is one that `blendkv` takes."""

import re
import shlex
from typing import Any

import pytest
import typer

from blendkv.cli import main
from tests.pages import ROOT

WrongUseError: Any = typer.BadParameter.__base__
"""Of the click that typer brings, which need not be the one that is installed."""
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(blendkv [^`]+)`(?!`)")
OPERATORS = {"|", "||", "&&", ";", ">", "2>", "<", "&"}
STANDS_FOR = {"COMMAND", "NAME", "...", "[MODEL]", "[URL]"}
"""What the documents write where a reader puts something."""


def lines(path) -> list[str]:
    """Command lines of console blocks, with those joined that a backslash continues."""
    blocks = "".join(CONSOLE.findall(path.read_text())).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in blocks.splitlines() if line.startswith("$ ")]


def arguments(line: str) -> list[str] | None:
    """What follows `blendkv` in a command line; None if another program is called."""
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:  # variables
        words = words[1:]
    if not words or words[0].rpartition("/")[2] != "blendkv":
        return None
    end = next((i for i, word in enumerate(words) if word in OPERATORS), len(words))
    return words[1:end]


def named(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The command that words call, a context for it, and the words that are left."""
    command = typer.main.get_command(main)
    context = command.context_class(command, info_name="blendkv")
    while hasattr(command, "commands") and words and words[0] not in STANDS_FOR and not words[0].startswith("-"):
        name, *words = words
        if name not in command.commands:
            raise WrongUseError(f"there is no command {name!r}")
        command = command.commands[name]
        context = command.context_class(command, parent=context, info_name=name)
    return command, context, words


def parse(words: list[str]) -> None:
    """Parses a command line as `blendkv` would, without running it; where `...` stands for something, names alone."""
    if "..." in words:
        return check_names(words)
    command, context, rest = named(words)
    if rest != ["--help"]:
        command.make_context(context.info_name, list(rest), parent=context.parent)


def console_lines(path) -> list[list[str]]:
    """Arguments of every call of `blendkv` in console blocks."""
    return [words for line in lines(path) if (words := arguments(line)) is not None]


def inline_lines(path) -> list[list[str]]:
    """The same of those in sentences."""
    return [shlex.split(said)[1:] for said in INLINE.findall(path.read_text())]


def check_names(words: list[str]) -> None:
    """In sentences they leave out what they are not about, so only names of commands and options are looked at."""
    command, _, rest = named(words)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for option in {word.partition("=")[0] for word in rest if word.startswith("--")} - known - {"--help"}:
        raise WrongUseError(f"there is no option {option}")


def wrong(check, found) -> list[str]:
    """What `blendkv` would say of each line that it does not take."""
    said = []
    for words in found:
        try:
            check(list(words))
        except WrongUseError as error:
            said.append(f"blendkv {shlex.join(words)}: {error}")
    return said


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines(path):
    assert wrong(parse, console_lines(path)) == []
    assert wrong(check_names, inline_lines(path)) == []


def test_lines_are_found_and_wrong_ones_refused():
    assert sum(len(console_lines(path)) for path in FILES) > 40
    assert sum(len(inline_lines(path)) for path in FILES) > 40
    with pytest.raises(WrongUseError):
        parse(arguments("$ blendkv demo --rato 0.1".removeprefix("$ ")))
    with pytest.raises(WrongUseError):
        parse(arguments("OMP_NUM_THREADS=1 blendkv bench tfft bundled | tee x"))
    with pytest.raises(WrongUseError):
        parse(["precompute", "bundled"])
