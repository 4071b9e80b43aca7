"""Where a Valkey or Redis server is: from a URL, or from a client that somebody has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.connection import SSLConnection, parse_url

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_OPTIONS = {"ttl": float, "connect_timeout": float, "read_timeout": float, "timeout": float, "prefix": str}
_ADDRESS = ("host", "port", "path", "db", "username", "password", "credential_provider", "client_name")
_SECRET = ("password", "ssl_password")


@dataclass(frozen=True)
class Target:
    """A server to talk to.

    Attributes:
        url: where it is, without passwords.
        settings: arguments of a connection of redis-py.
        cluster: whether it must be a Cluster.
        options: settings of the store.
    """

    url: str
    settings: dict[str, Any] = field(repr=False)
    cluster: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def parse(url: str) -> Target:
    """The target of `redis[s]://`, `valkey[s]://` and the same with `+cluster`.

    Raises:
        ValueError: for a URL that makes no sense.
    """
    parts = urlsplit(url)
    scheme, plus, kind = parts.scheme.partition("+")
    if scheme not in SCHEMES or (plus and kind != "cluster"):
        raise ValueError(f"scheme {parts.scheme!r}: a Valkey or Redis URL starts with redis://, rediss:// or valkey://")
    try:
        _ = parts.port
    except ValueError:  # which quotes what may be a part of a password
        raise ValueError(
            f"in the query or port of a {scheme} URL: the port is no number; in a password write / ? # as %2F %3F %23"
        ) from None
    query = dict(parse_qsl(parts.query))
    cluster = bool(plus) or query.pop("cluster", "false").lower() in ("true", "1", "yes")
    try:
        options = {name: kind(query.pop(name)) for name, kind in _OPTIONS.items() if name in query}
        settings = parse_url(urlunsplit((SCHEMES[scheme], parts.netloc, parts.path, urlencode(query), "")))
    except ValueError as error:
        raise ValueError(f"in the query or port of a {scheme} URL: {error}") from None
    if cluster and settings.get("db"):
        raise ValueError(f"db {settings['db']}: a Cluster has database 0 only, leave it out")
    shown = {name: value for name, value in parse_qsl(parts.query) if name not in _SECRET}
    user = f"{parts.username}@" if parts.username else ""
    place = user + parts.netloc.rpartition("@")[2]
    return Target(urlunsplit((parts.scheme, place, parts.path, urlencode(shown), "")), settings, cluster, options)


def of_client(client: Any) -> Target:
    """The target of a `redis.Redis` or `redis.RedisCluster`.

    Raises:
        TypeError: for another object.
    """
    nodes = getattr(client, "nodes_manager", None)
    pool = getattr(client, "connection_pool", None)
    if nodes is not None:
        first = next(iter(nodes.startup_nodes.values()))
        settings = {**nodes.connection_kwargs, "host": first.host, "port": first.port}
    elif pool is not None:
        settings = dict(pool.connection_kwargs)
    else:
        raise TypeError(f"client={type(client).__name__}: pass a redis.Redis or redis.RedisCluster, or a URL")
    kept = {name: value for name, value in settings.items() if name in _ADDRESS or name.startswith("ssl_")}
    kept = {name: value for name, value in kept.items() if value is not None}
    if pool is not None:
        kept["connection_class"] = pool.connection_class
    elif settings.get("ssl"):
        kept["connection_class"] = SSLConnection
    scheme = "rediss" if any(name.startswith("ssl_") for name in kept) else "redis"
    place = f"{kept.get('host', 'localhost')}:{kept.get('port', 6379)}"
    return Target(f"{scheme}://{place}/{kept.get('db', 0) or ''}", kept, nodes is not None)
