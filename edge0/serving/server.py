"""Sockets and signals: listen, open the engine, serve until a signal, let go of everything."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from edge0.errors import Edge0Error, ErrorKind
from edge0.serving.app import Service

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
GRACE_SECONDS = 30  # for connections to end after a signal


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(host: str) -> tuple[str, ...] | None:
    """Names by which a server on `host` may be called. On loopback only its own, or any page in a browser could reach
    it under a name that resolves here; elsewhere any, as the API key is in the way."""
    if not is_loopback(host):
        return None
    return (*LOOPBACK_NAMES, f"[{host}]" if ":" in host else host)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 is any free one.

    Raises:
        Edge0Error: OPTION_INVALID.
    """
    try:
        if not 0 <= port < 1 << 16:  # the resolver would take it modulo 65,536
            raise OverflowError("no such port")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        raise Edge0Error(
            ErrorKind.OPTION_INVALID, f"cannot listen ({error})", found=f"host {host}, port {port}"
        ) from error
    return listener


class Server(uvicorn.Server):
    """Serves one `Service`. A signal ends running answers at their next token, instead of waiting for their end.

    Args:
        ready: called once connections are taken.
    """

    def __init__(self, service: Service, ready: Callable[[], None] = lambda: None):
        self._service, self._ready = service, ready
        super().__init__(
            uvicorn.Config(
                service.app(),
                http="h11",
                ws="none",
                loop="asyncio",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.worker.stop()
        await super().shutdown(sockets)
