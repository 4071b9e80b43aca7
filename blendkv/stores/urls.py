"""URLs as they may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


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
