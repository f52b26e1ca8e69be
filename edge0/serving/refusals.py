"""Everything that can go wrong with a request, as a status, OpenAI's error object, and one word for the metrics."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from edge0.errors import Edge0Error, ErrorKind
from edge0.serving.worker import QueueFull, Stopped

log = logging.getLogger(__name__)

BY_CLIENT = (
    ErrorKind.REQUEST_INVALID,
    ErrorKind.PROMPT_INVALID,
    ErrorKind.TEMPLATE_INVALID,
    ErrorKind.OPTION_INVALID,
)
RETRY_SECONDS = 5


class Gone(Exception):
    """The client hung up."""


class DeadlinePassed(Exception):
    """The request took longer than this server lets one take."""


class Refusal(Exception):
    """An answer that is an error.

    Args:
        outcome: what the metrics call it.
        code: what programs may look at.
        param: the field of the body that is at fault.
    """

    def __init__(self, status: int, outcome: str, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.outcome, self.message, self.code, self.param = status, outcome, message, code, param
        self.headers: dict[str, str] = {}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        if status in (429, 503):
            self.headers["Retry-After"] = str(RETRY_SECONDS)

    def body(self) -> dict:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def refusal_of(error: Exception) -> Refusal:
    """What to tell the client. What is wrong on this side is logged in full and told in general: paths stay here."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Edge0Error) and error.kind in BY_CLIENT:
        told = Edge0Error(
            error.kind,
            error.detail,
            tensor=error.tensor,
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        )
        return Refusal(400, "invalid", str(told), code=error.kind.name.lower(), param=error.tensor)
    if isinstance(error, HTTPException):
        refusal = Refusal(error.status_code, "invalid", str(error.detail))
        refusal.headers |= error.headers or {}
        return refusal
    if isinstance(error, QueueFull):
        return Refusal(429, "busy", "the queue is full", code="queue_full")
    if isinstance(error, Stopped):
        return Refusal(503, "stopped", "the server is shutting down", code="shutting_down")
    if isinstance(error, DeadlinePassed):
        return Refusal(504, "deadline", "the request took longer than this server allows", code="deadline")
    if isinstance(error, Gone):
        return Refusal(499, "disconnected", "the client hung up")
    log.error("a request failed", exc_info=error)
    if isinstance(error, Edge0Error):
        return Refusal(500, "failed", f"the engine failed: {error.kind.value}", code=error.kind.name.lower())
    return Refusal(500, "failed", "the server failed", code="internal_error")
