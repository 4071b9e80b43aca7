"""`blendkv serve`: a store behind HTTP."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendkv._console import work
from blendkv._options import one_of, read_size
from blendkv.sockets import LOOPBACK, listen

if TYPE_CHECKING:
    from blendkv.stores.base import Store
    from blendkv.stores.catalog import Centre

_PACKAGES = ("httptools", "prometheus_client", "starlette", "uvicorn")
_VALKEY = ("redis", "rediss", "valkey", "valkeys")


def serve(
    store: Annotated[str, typer.Option(metavar="URL", help="Store to serve: a folder, s3://..., redis://...")],
    central: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Central gateway (https://host:port), or store, that is asked for what is not here. What it gives is "
            "checked and kept. Its token comes from $BLENDKV_TOKEN.",
        ),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Who decides what names of documents stand for: redis://..., or a gateway. By default the --store if "
            "that is one Valkey or Redis server, or the --central gateway if it has names.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. 127.0.0.1 is reached from this machine alone.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8765,
    token: Annotated[
        list[str] | None,
        typer.Option(help="Token of clients; several by naming it again. Others on this machine may see it in `ps`."),
    ] = None,
    read_token: Annotated[list[str] | None, typer.Option(help="Token of clients that may only read.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of tokens, one a line, for this user only; made with a new one if it is not there. Without any "
            "token: gateway-token in ~/.cache/blendkv, or $BLENDKV_HOME.",
            show_default=False,
        ),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Key of the certificate.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Transfers that are sent at a time; clients take turns.")] = 16,
    policy: Annotated[str, typer.Option(help="Whose turn it is: drr, softmax or fifo.")] = "drr",
    max_entry: Annotated[str, typer.Option(metavar="SIZE", help="Largest entry that may be put.")] = "1G",
    max_upload: Annotated[str, typer.Option(metavar="SIZE", help="Of all entries being put, together.")] = "2G",
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a folder: what was not used for longest gives way (64G).")
    ] = None,
    connections: Annotated[int, typer.Option(min=1, help="Most connections at a time.")] = 1024,
    allow_delete: Annotated[bool, typer.Option("--allow-delete", help="Let clients delete entries.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error: lines of JSON on stderr.")] = "info",
) -> None:
    """Serve a store over HTTP, to clients that have a token.

    Clients open it as `open_store("http://HOST:PORT/chunks")`, with the token in $BLENDKV_TOKEN. It listens on this
    machine alone unless told otherwise, keeps nothing that the store does not keep, and any number of gateways may
    serve one store.
    """
    from blendkv.loading.queues import POLICIES

    one_of("--policy", policy, POLICIES)
    one_of("--log-level", log_level, ("debug", "info", "warning", "error"))
    entry_bytes, upload_bytes = read_size(max_entry, "--max-entry"), read_size(max_upload, "--max-upload")
    capacity_bytes = None if capacity is None else read_size(capacity, "--capacity")
    if entry_bytes < 1 or upload_bytes < entry_bytes:
        raise typer.BadParameter("at least --max-entry, which is at least 1", param_hint="--max-upload")
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise typer.BadParameter("a certificate and its key go together", param_hint="--ssl-certfile, --ssl-keyfile")
    with work(as_json=False):
        _require_packages()
        from blendkv.serving.arenas import share_arenas
        from blendkv.serving.limits import Limits
        from blendkv.serving.logs import Log
        from blendkv.serving.server import GatewayServer, Settings
        from blendkv.serving.tokens import Tokens

        share_arenas()
        told = _check_tls(ssl_certfile, ssl_keyfile)
        tokens, where = _tokens(token, token_file, bool(read_token))
        keys = Tokens(tokens, read_token or ())
        opened = _open_store(store, capacity_bytes)
        far = _open_central(central)
        centre = _open_catalog(catalog, store, central)
        settings = Settings(
            store=opened,
            tokens=keys,
            limits=Limits(slots=slots, entry_bytes=entry_bytes, upload_bytes=upload_bytes, connections=connections),
            policy=policy,
            central=far,
            catalog=centre,
            deletes=allow_delete,
            log=Log(log_level),
            certificate=told and str(ssl_certfile),
            certificate_key=told and str(ssl_keyfile),
        )
        sock = listen(host, port)
        shown_host = f"[{host}]" if ":" in host else host
        url = f"http{'s' if told else ''}://{shown_host}:{sock.getsockname()[1]}"

        def ready() -> None:
            typer.echo(f"blendkv: {opened.url} is served at {url}/chunks{where}", err=True)
            if host not in LOOPBACK and not told:
                typer.echo(
                    f"blendkv: {host} is reached from other machines, and without --ssl-certfile tokens and chunks can "
                    "be read on the way: put TLS in front of it, or give a certificate",
                    err=True,
                )
            settings.log.write("info", "ready", url=url, pid=os.getpid(), central=far.url if far else None)

        before = signal.signal(signal.SIGTERM, _leave)
        try:
            GatewayServer(settings, [sock], ready).run()
        finally:
            signal.signal(signal.SIGTERM, before)
            for part in (opened, far, centre):
                getattr(part, "close", lambda: None)()


def _leave(*args: object) -> None:
    """What uvicorn hands on once it has ended for a SIGTERM: stores are closed before the process is."""
    raise SystemExit(0)


def _require_packages() -> None:
    import importlib.util

    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"blendkv serve needs {', '.join(missing)}: pip install 'blendkv[serve]'")


def _check_tls(certificate: Path | None, key: Path | None) -> str | None:
    """Whether there is TLS; a certificate that cannot be used is found now."""
    if certificate is None or key is None:
        return None
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{certificate} with {key} is no certificate that can be used ({reason}): both are PEM files"
        ) from error
    return "yes"


def _tokens(given: list[str] | None, file: Path | None, readers: bool) -> tuple[list[str], str]:
    """Tokens, and where they are, for people."""
    if file is None and (given or readers):
        return given or [], ""
    from blendkv._paths import blendkv_home
    from blendkv.serving.tokens import FILE, token_file

    path = blendkv_home() / FILE if file is None else file.expanduser()
    found, made = token_file(path)
    return [*(given or []), *found], f", the token is in {path}{' (made now)' if made else ''}"


def _open_store(url: str, capacity_bytes: int | None) -> Store:
    from blendkv.stores import open_store

    folder = "://" not in url or url.lower().startswith("file://")
    if capacity_bytes is not None and not folder:
        raise typer.BadParameter("it goes with a folder", param_hint="--capacity")
    return open_store(url, **({"capacity_bytes": capacity_bytes} if capacity_bytes is not None else {}))


def _scheme(url: str | None) -> str:
    return (url or "").partition("://")[0].lower()


def _open_central(url: str | None) -> Store | None:
    if url is None:
        return None
    from blendkv.stores import open_store

    gateway = _scheme(url) in ("http", "https")
    return open_store(_base(url) + "/chunks" if gateway else url)


def _base(url: str) -> str:
    """A gateway's URL without the part that leads to its entries."""
    return url.rstrip("/").removesuffix("/chunks")


def _open_catalog(url: str | None, store: str, central: str | None) -> Centre | None:
    """Who decides about names; None where nobody was named and nobody offers to."""
    from blendkv.errors import StoreError

    asked = url is not None
    if url is None:
        url = central if _scheme(central) in ("http", "https") else store if _scheme(store) in _VALKEY else None
    if url is None:
        return None
    scheme = _scheme(url)
    try:
        if scheme in ("http", "https"):
            from blendkv.stores.http import token_for
            from blendkv.stores.http_centre import HttpCentre

            return HttpCentre(_base(url), token=token_for(url))
        if scheme in _VALKEY:
            from blendkv.stores.valkey_centre import ValkeyCentre

            return ValkeyCentre(url)
    except StoreError:
        if asked:
            raise
        return None
    raise typer.BadParameter(f"{scheme or url!r}: redis://... or a gateway's https://...", param_hint="--catalog")
