"""URLs as they may be shown."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_MEANT = re.compile(r"[%#?\x00-\x1f\x7f]")
"""What a path may hold, and stands for something else in a URL."""


def shown(url: str) -> str:
    """A URL without user, password and query, for messages; a path as it is."""
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
        _ = parts.port  # of a password with a slash in it a part looks like a port
    except ValueError:
        return url.partition("://")[0] + "://..."
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def url_of(folder: str) -> str:
    """The `file://` URL of a folder, for people too: what needs no quoting is not quoted."""
    return "file://" + _MEANT.sub(lambda found: quote(found[0]), folder)


def path_of(url: str) -> str:
    """The path in a `file://` URL.

    Raises:
        ValueError: if it is another machine's, or has a query or a fragment.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{shown(url)}: a file URL has three slashes, file:///folder; another machine's is no file")
    if "?" in url or "#" in url:
        raise ValueError(f"{shown(url)}...: a file URL has no ? and no #: write %3F and %23, or give the path alone")
    return unquote(parts.path)
