"""Keeps out who does not know the key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from edge0.serving.refusals import Refusal


class KeyGuard:
    """ASGI middleware: `Authorization: Bearer KEY` or 401, before a byte of a body is read.

    Args:
        exempt: a path that anybody may ask for.
    """

    def __init__(self, app: ASGIApp, key: str, exempt: str):
        self._app, self._key, self._exempt = app, key.encode(), exempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"] != self._exempt and not self._knows(scope):
            app = Refusal(401, "invalid", "the API key is missing or wrong", code="invalid_api_key").response()
        await app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)
