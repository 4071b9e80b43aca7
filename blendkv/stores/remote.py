"""Entries as objects of whatever fsspec reaches: S3 and its like, HTTP, the Hugging Face hub, memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from secrets import token_hex
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from blendkv.errors import StoreError
from blendkv.stores.base import Entry, StoreStats
from blendkv.stores.breaker import Breaker
from blendkv.stores.deadline import remaining
from blendkv.stores.keys import is_key, key_of, place_of
from blendkv.stores.patience import Patience
from blendkv.stores.urls import shown

_HTTP = frozenset({"http", "https"})
READ_ONLY = _HTTP | {"hf"}
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs"})
_WHOLE = _BUCKETS | {"abfs", "abfss", "az", "memory"}
"""Where an object is written whole or not at all."""
_PROBE = "0" * 64


class RemoteStore:
    """Bytes under keys, one object each, `url/ab/ab12....bkv`, by fsspec.

    A store that fails or stalls costs a prompt no more than its deadline, and after five failures in a row nothing: it
    is then asked once a second, until it answers again.

    Args:
        url: `s3://bucket/folder`, `https://host/folder`, `hf://datasets/name/folder`, `memory://folder`, ...; HTTP and
            the hub are read only, but for gateways (`blendkv serve`).
        timeout: most seconds for a read, outside of any deadline.
        put_timeout: most seconds for a put or a listing.
        calls: most calls under way.
        **options: of the file system, such as `key`, `secret`, `endpoint_url` for S3, `token` for HTTP (or
            `$BLENDKV_TOKEN`: `blendkv.stores.http.token_for`).

    Attributes:
        read_only: whether puts are refused.
        local: whether nobody but this user reaches it, and it keeps nobody waiting.

    Raises:
        StoreError: if it cannot be reached, refuses, or needs a package that is not installed.
    """

    def __init__(
        self, url: str, *, timeout: float = 5.0, put_timeout: float = 60.0, calls: int = 16, **options: Any
    ) -> None:
        scheme = url.partition("://")[0]
        self.url, self.stats = shown(url), StoreStats()
        self._timeout, self._put_timeout = timeout, put_timeout
        self.local = scheme in ("memory", "file", "local")
        self.read_only, self._whole = scheme in READ_ONLY, scheme in _WHOLE or scheme in _HTTP
        self._breaker, self._patience = Breaker(), Patience(calls)
        try:
            if scheme in _HTTP:
                self._fs, self._root = _http(url, {"patience": timeout, "put_patience": put_timeout, **options})
            else:
                settings = {**_patient(scheme, timeout), **options, "skip_instance_cache": True}
                self._fs, self._root = url_to_fs(url, use_listings_cache=False, **settings)
        except ImportError as error:
            if scheme in _HTTP:
                raise StoreError(f"{self.url} cannot be opened: {error}") from error
            bring = "pip install 'blendkv[s3]'" if scheme in ("s3", "s3a") else "install it"
            raise StoreError(f"{self.url} needs a package that is not installed ({error}): {bring}") from error
        except Exception as error:  # some file systems connect here
            raise StoreError(f"{self.url} cannot be opened: {error}; look at host, network and settings") from error
        if scheme in ("s3", "s3a"):
            self._fs.retries = 1  # botocore does that
        self._root = self._root.rstrip("/")
        self._probe(scheme)
        if scheme in _HTTP:
            with suppress(Exception):
                self._patience.call(lambda: self._fs.greet(self._root), max(self._timeout, 5.0))
            self.read_only = "PUT" not in self._fs.allowed

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None; one ranged request."""
        if not is_key(key):
            return self._missed("key")
        if stop is not None and stop <= start:
            return self._missed("") if self.size(key) is None else self._found(b"")
        span = {} if start == 0 and stop is None else {"start": start, "end": stop}
        try:
            data = self._ask(lambda: self._fs.cat_file(self._path(key), **span), self._timeout)
        except Exception as error:
            return self._missed(fault_of(error))
        if stop is not None and len(data) > stop - start:
            if len(data) < stop:
                return self._missed("length")
            data = data[start:stop]  # a server that knows no ranges gave all of it
        return self._found(data)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Whole entries, those that there are, asked for at once."""
        keys = list(dict.fromkeys(keys))
        paths = {self._path(key): key for key in keys if is_key(key)}
        if len(paths) < len(keys):
            self.stats.count("misses", "key", len(keys) - len(paths))
        if not paths:
            return {}
        try:
            answers = self._ask(lambda: self._fs.cat(list(paths), on_error="return"), self._timeout)
        except Exception as error:
            self.stats.count("misses", fault_of(error), len(paths))
            return {}
        found = {}
        for path, key in paths.items():
            data = answers.get(path, FileNotFoundError())
            if isinstance(data, Exception):
                self._missed(fault_of(data))
            else:
                found[key] = self._found(data)
        return found

    def size(self, key: str) -> int | None:
        """Bytes of an entry, or None."""
        if not is_key(key):
            return None
        try:
            return self._ask(lambda: self._fs.info(self._path(key))["size"], self._timeout)
        except Exception:
            return None

    def put(self, key: str, data: bytes) -> bool:
        """Stores an entry; False if it could not be kept, or not in time."""
        fault = "" if is_key(key) else "key"
        if not fault and self.read_only:
            fault = "readonly"
        if not fault:
            try:
                self._ask(lambda: self._write(self._path(key), bytes(data)), self._put_timeout)
            except Exception as error:
                fault = fault_of(error) or "absent"  # the bucket went away
        self.stats.count("put_failures" if fault else "puts", fault)
        return not fault

    def delete(self, key: str) -> None:
        """Forgets an entry; an unknown key is fine."""
        if is_key(key) and not self.read_only:
            with suppress(Exception):
                self._ask(lambda: self._fs.rm_file(self._path(key)), self._timeout)

    def keys(self) -> Iterator[str]:
        """Keys of all entries; none where there are no listings (HTTP)."""
        return (key for key, _ in self._listing())

    def entries(self) -> Iterator[Entry]:
        """All entries, by one listing; last used is when they were stored, if the listing says that."""
        return (Entry(key, int(info.get("size") or 0), _when(info)) for key, info in self._listing())

    def close(self) -> None:
        """Lets go of the file system and its connections."""
        self._fs.invalidate_cache()

    def _listing(self) -> Iterator[tuple[str, dict[str, Any]]]:
        found: dict[str, dict[str, Any]] = {}
        try:
            found = self._ask(lambda: self._fs.find(self._root, detail=True), self._put_timeout)
        except FileNotFoundError:
            pass  # nothing was ever put
        except Exception as error:
            self._missed(fault_of(error))
        return ((key, info) for name, info in found.items() if (key := key_of(name.rpartition("/")[2])))

    def _path(self, key: str) -> str:
        return "/".join((self._root, *place_of(key)))

    def _write(self, path: str, data: bytes) -> None:
        if self._whole:
            self._fs.pipe_file(path, data)
            return
        temporary = f"{path}.{token_hex(4)}.tmp"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _ask(self, function: Callable[[], Any], most: float) -> Any:
        seconds = remaining(most)
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        if not self._breaker.allows():
            raise _OpenBreaker("not asked: it did not answer lately")
        try:
            answer = self._patience.call(function, seconds)
        except (FileNotFoundError, PermissionError):
            self._breaker.succeeded()  # it answers; S3 denies what is not there to those who may not list
            raise
        except Exception:
            self._breaker.failed()
            raise
        self._breaker.succeeded()
        return answer

    def _probe(self, scheme: str) -> None:
        """A first request: to the bucket where there is one, else for an entry that is not there."""
        bucket = self._root.partition("/")[0]

        def request() -> None:
            if scheme in _BUCKETS:
                self._fs.info(bucket)
            else:
                self._fs.cat_file(self._path(_PROBE))

        try:
            self._patience.call(request, max(self._timeout, 5.0))
        except FileNotFoundError as error:
            if scheme in _BUCKETS:
                raise StoreError(f"{self.url}: there is no bucket {bucket!r}; make it, or look at the name") from error
        except PermissionError as error:
            raise StoreError(f"{self.url} refuses ({error}); look at key, secret and the bucket's policy") from error
        except Exception as error:
            if scheme in _HTTP and fault_of(error) == "denied":
                raise StoreError(f"{self.url} refuses: give its token with token=... or $BLENDKV_TOKEN") from None
            raise StoreError(
                f"{self.url} does not answer ({type(error).__name__}: {error}); look at host, endpoint_url and network"
            ) from error

    def _found(self, data: bytes) -> bytes:
        self.stats.count("hits")
        return data

    def _missed(self, fault: str) -> None:
        self.stats.count("misses", fault)


class _OpenBreaker(Exception):
    """Not asked: it did not answer lately."""


def fault_of(error: BaseException) -> str:
    """A word for counters; none for an object that is not there."""
    if isinstance(error, FileNotFoundError):
        return ""
    if isinstance(error, _OpenBreaker):
        return "breaker"
    if isinstance(error, TimeoutError):
        return "deadline"
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return "denied"
    return "busy" if getattr(error, "errno", None) == errno.EBUSY else "io"


def _when(info: dict[str, Any]) -> float | None:
    """When an object was written, under whatever name its file system has for that."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return None


def schemes() -> set[str]:
    """What fsspec knows, whether installed or not."""
    return set(fsspec.available_protocols())


def _patient(scheme: str, timeout: float) -> dict[str, Any]:
    """Settings of file systems that would otherwise wait for minutes, and try again for ever."""
    if scheme in ("s3", "s3a"):
        retries = {"max_attempts": 1}
        config = {"connect_timeout": min(timeout, 2.0), "read_timeout": timeout, "retries": retries}
        return {"config_kwargs": config, "max_concurrency": 1}
    return {}


def _http(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """A file system of HTTP, with its token, and its root."""
    from blendkv.stores.http import HttpFiles, token_for

    options.setdefault("token", token_for(url))
    return HttpFiles(**options, skip_instance_cache=True), url
