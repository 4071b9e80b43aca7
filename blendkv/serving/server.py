"""A gateway put together, and run by uvicorn."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvicorn

from blendkv.loading.queues import DEFAULT_POLICY
from blendkv.loading.scheduler import TransferScheduler
from blendkv.serving.app import Gateway
from blendkv.serving.central import Central
from blendkv.serving.chunks import Chunks
from blendkv.serving.limits import Limits
from blendkv.serving.logs import Log, UvicornHandler
from blendkv.serving.metrics import Metrics
from blendkv.serving.names import Names
from blendkv.serving.protocol import guarded
from blendkv.serving.tokens import Tokens
from blendkv.sockets import BACKLOG
from blendkv.stores.base import Store
from blendkv.stores.catalog import Centre

GRACE_SECONDS = 5


@dataclass
class Settings:
    """A gateway's parts.

    Attributes:
        store: that it serves.
        tokens: of who may ask.
        limits: of what they may do.
        policy: who is next.
        central: store of the central gateway, for a regional one.
        catalog: who decides what names stand for.
        deletes: whether entries may be deleted.
        verify: whether what is put must be a chunk file under its own key.
        log: where events go.
        certificate: file of a certificate, and of those that vouch for it, for TLS.
        certificate_key: file of its key.
    """

    store: Store
    tokens: Tokens
    limits: Limits = field(default_factory=Limits)
    policy: str = DEFAULT_POLICY
    central: Store | None = None
    catalog: Centre | None = None
    deletes: bool = False
    verify: bool = True
    log: Log = field(default_factory=Log)
    certificate: str | None = None
    certificate_key: str | None = None


class GatewayServer:
    """A gateway that listens, until it is stopped.

    Args:
        settings: its parts.
        sockets: that it listens on (`listen`).
        ready: called once it answers.
    """

    def __init__(
        self, settings: Settings, sockets: Sequence[socket.socket], ready: Callable[[], None] = lambda: None
    ) -> None:
        self._settings, self._sockets = settings, list(sockets)
        self.metrics = metrics = Metrics()
        metrics.store("store", settings.store)
        self._scheduler: TransferScheduler | None = None
        central = None
        if settings.central is not None:
            metrics.store("central", settings.central)
            self._scheduler = TransferScheduler(settings.limits.slots, settings.policy)
            central = Central(settings.central, settings.store, self._scheduler, metrics, settings.verify)
        self.chunks = Chunks(
            settings.store, settings.limits, metrics, settings.policy, central=central, verify=settings.verify
        )
        names = None if settings.catalog is None else Names(settings.catalog)
        self.app = Gateway(self.chunks, settings.tokens, metrics, settings.log, names, settings.deletes)
        self._server = _Server(self._config(), ready)

    def run(self) -> None:
        """Serves until a signal comes, or `stop`."""
        handlers: list[logging.Handler] = [UvicornHandler(self._settings.log)]
        logger = logging.getLogger("uvicorn.error")
        before = logger.handlers, logger.propagate, logger.level
        logger.handlers, logger.propagate = handlers, False
        logger.setLevel(logging.INFO)
        try:
            self._server.run(sockets=self._sockets)
        finally:
            logger.handlers, logger.propagate, level = before
            logger.setLevel(level)
            for sock in self._sockets:
                sock.close()
            if self._scheduler is not None:
                self._scheduler.close(GRACE_SECONDS)

    def stop(self) -> None:
        """Ends `run`, from another thread."""
        self._server.should_exit = True

    def _config(self) -> uvicorn.Config:
        settings = self._settings
        limits = settings.limits

        def cut(why: str) -> None:
            self.metrics.cut.labels(why).inc()
            settings.log.write("warning", "cut", why=why)

        return uvicorn.Config(
            self.app,
            http=guarded(limits, cut),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(limits.idle_seconds)),
            timeout_graceful_shutdown=GRACE_SECONDS,
            limit_concurrency=limits.connections,
            backlog=BACKLOG,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.certificate_key,
        )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()
