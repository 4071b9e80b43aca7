"""HTTP as fsspec speaks it, and what a gateway of `blendkv serve` takes besides: a token, puts, deletes, a listing."""

from __future__ import annotations

import json
import os
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from fsspec.asyn import sync

from blendkv import _extras
from blendkv.stores.keys import key_of, place_of

try:
    from aiohttp import ClientResponseError, ClientTimeout
    from fsspec.implementations.http import HTTPFileSystem  # imports aiohttp
except ImportError as error:
    raise _extras.missing("a store over HTTP", "serve", error) from error

TOKEN_VARIABLE = "BLENDKV_TOKEN"
MARK = "blendkv-gateway"


def token_for(url: str) -> str | None:
    """The token for a host, from `$BLENDKV_TOKEN`: `HOST:PORT=TOKEN`, several with commas, or a TOKEN for every host.

    A port that is not named is any port.
    """
    parts, general = urlsplit(url), None
    for each in os.environ.get(TOKEN_VARIABLE, "").split(","):
        where, equals, token = each.strip().partition("=")
        if not equals:
            general = where or general
        elif where.lower() in (parts.hostname, parts.netloc.rpartition("@")[2].lower()):
            return token
    return general


class HttpFiles(HTTPFileSystem):
    """Files of an HTTP server.

    Args:
        token: sent with every request, as a bearer token.
        patience: seconds to connect, and of silence.
        put_patience: seconds of silence after a put was sent.
        **options: of fsspec's `HTTPFileSystem`.
    """

    cachable = False

    def __init__(
        self, *, token: str | None = None, patience: float = 5.0, put_patience: float = 60.0, **options: Any
    ) -> None:
        client = dict(options.pop("client_kwargs", None) or {})
        client.setdefault("timeout", ClientTimeout(sock_connect=min(patience, 2.0), sock_read=patience))
        if token:
            client["headers"] = {**(client.get("headers") or {}), "Authorization": f"Bearer {token}"}
        super().__init__(client_kwargs=client, **options)
        self._put_timeout = ClientTimeout(sock_connect=min(patience, 2.0), sock_read=put_patience)
        self.allowed: frozenset[str] = frozenset()

    @property
    def storage_options(self) -> dict[str, Any]:
        """None: fsspec shows them, and a token would be among them."""
        return {}

    @storage_options.setter
    def storage_options(self, value: dict[str, Any]) -> None:
        pass

    def greet(self, root: str) -> None:
        """Asks what may be done at a URL: `allowed` has methods, if this is a gateway, and nothing if not."""
        sync(self.loop, self._greet, root)

    async def _greet(self, root: str) -> None:
        session = await self.set_session()
        async with session.options(self.encode_url(root)) as answer:
            if answer.ok and answer.headers.get(MARK) == "1":
                self.allowed = frozenset(part.strip() for part in answer.headers.get("Allow", "").split(","))

    async def _cat_file(self, url: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        try:
            return await super()._cat_file(url, start, end, **kwargs)
        except ClientResponseError as error:
            if error.status == 416:  # behind the end
                return b""
            raise

    async def _info(self, url: str, **kwargs: Any) -> dict[str, Any]:
        if not self.allowed:
            return await super()._info(url, **kwargs)
        session = await self.set_session()
        async with session.head(self.encode_url(url)) as answer:
            self._raise_not_found_for_status(answer, url)
            return {"name": url, "size": int(answer.headers["Content-Length"]), "type": "file"}

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        session = await self.set_session()
        async with session.put(self.encode_url(path), data=BytesIO(value), timeout=self._put_timeout) as answer:
            await answer.read()
            self._raise_not_found_for_status(answer, path)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        session = await self.set_session()
        async with session.delete(self.encode_url(path)) as answer:
            self._raise_not_found_for_status(answer, path)

    async def _find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Entries of a gateway, from its list; of another server, what its pages link to."""
        if not self.allowed:
            return await super()._find(path, *args, **kwargs)
        session = await self.set_session()
        found = {}
        async with session.get(self.encode_url(path), timeout=self._put_timeout) as answer:
            self._raise_not_found_for_status(answer, path)
            async for line in answer.content:
                key, size, used = json.loads(line)
                name = "/".join((path, *place_of(key)))
                if key_of(name.rpartition("/")[2]):
                    found[name] = {"name": name, "size": int(size), "type": "file", "mtime": used}
        return found
