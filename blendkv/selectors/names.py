"""Names of selectors, as the command line says them.

union    = [percent "%"] product ("+" [percent "%"] product)*
product  = power ("*" power)*
power    = spread ["^" number]
spread   = atom ("@" ("per-chunk" | "window" odd number | "first" number))*
atom     = family ["-" argument] | "(" union ")"
"""

from __future__ import annotations

import re
from collections.abc import Callable

from blendkv.selectors.base import Selector
from blendkv.selectors.combined import First, PerChunk, Product, Union, Window

_TOKEN = re.compile(r"\s*([A-Za-z_][\w.:-]*|\d+(?:\.\d+)?|[+*^@()%])")
_ATOM = re.compile(r"[A-Za-z_].*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WINDOW = re.compile(r"window(\d+)")
_FIRST = re.compile(r"first(\d+)")


def parse(name: str, atom: Callable[[str], Selector]) -> Selector:
    """The selector that a name describes.

    Args:
        name: as in this module's grammar.
        atom: makes the selector of a family's name, with its argument.

    Raises:
        ValueError: with the name, and what was expected where.
    """
    parser = _Parser(name, atom)
    found = parser.union()
    if parser.rest:
        raise parser.error("'+', '*', '^' or '@'")
    return found


class _Parser:
    """Reads a name from left to right."""

    def __init__(self, name: str, atom: Callable[[str], Selector]) -> None:
        self.name, self.atom = name, atom
        self.rest: list[str] = []
        at = 0
        while at < len(name.rstrip()):
            found = _TOKEN.match(name, at)
            if found is None:
                raise ValueError(
                    f"selector {name!r}: {name[at:]!r} is not part of a name (see blendkv.selectors.names)"
                )
            self.rest.append(found[1])
            at = found.end()

    def error(self, wanted: str) -> ValueError:
        """What to raise at this place."""
        found = repr(self.rest[0]) if self.rest else "the end"
        return ValueError(f"selector {self.name!r}: {wanted} expected, not {found}, as in 'attention*hkvd-v^0.5'")

    def take(self, token: str) -> bool:
        """Whether the next token is this one, which is then read."""
        if self.rest[:1] != [token]:
            return False
        self.rest.pop(0)
        return True

    def number(self) -> float:
        """Reads one."""
        if not self.rest or not _NUMBER.fullmatch(self.rest[0]):
            raise self.error("a number")
        return float(self.rest.pop(0))

    def union(self) -> Selector:
        """See the grammar."""
        shares, parts = [self.share()], [self.product()]
        while self.take("+"):
            shares.append(self.share())
            parts.append(self.product())
        if len(parts) == 1 and shares[0] is None:
            return parts[0]
        given = sum(share for share in shares if share is not None)
        open_shares = shares.count(None)
        if given > 100 or (given == 100 and open_shares) or (given != 100 and not open_shares):
            raise ValueError(f"selector {self.name!r}: its shares do not add up to 100%")
        return Union(*parts, shares=[(100 - given) / open_shares if share is None else share for share in shares])

    def share(self) -> float | None:
        """A share in percent, if one is given."""
        if not self.rest or not _NUMBER.fullmatch(self.rest[0]):
            return None
        share = self.number()
        if not self.take("%"):
            raise self.error("'%'")
        return share

    def product(self) -> Selector:
        """See the grammar."""
        found = [self.power()]
        while self.take("*"):
            found.append(self.power())
        parts, powers = zip(*found, strict=True)
        return parts[0] if len(parts) == 1 and powers[0] == 1 else Product(parts, powers)

    def power(self) -> tuple[Selector, float]:
        """See the grammar."""
        base = self.spread()
        return base, self.number() if self.take("^") else 1.0

    def spread(self) -> Selector:
        """See the grammar."""
        found = self.group()
        while self.take("@"):
            how = self.rest.pop(0) if self.rest else ""
            window, first = _WINDOW.fullmatch(how), _FIRST.fullmatch(how)
            if how == "per-chunk":
                found = PerChunk(found)
            elif window is not None:
                found = Window(found, int(window[1]))
            elif first is not None:
                found = First(found, int(first[1]))
            else:
                raise ValueError(
                    f"selector {self.name!r}: after '@' goes per-chunk, a window such as window5, or first4"
                )
        return found

    def group(self) -> Selector:
        """See the grammar."""
        if self.take("("):
            found = self.union()
            if not self.take(")"):
                raise self.error("')'")
            return found
        if not self.rest or not _ATOM.fullmatch(self.rest[0]):
            raise self.error("the name of a selector")
        return self.atom(self.rest.pop(0))
