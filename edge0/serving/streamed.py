"""A response that goes out piece by piece, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from edge0.serving.completion import Finished
from edge0.serving.exchange import Exchange
from edge0.serving.metrics import RequestRecord
from edge0.serving.refusals import refusal_of
from edge0.serving.replies import DONE, Reply, event_bytes


class Streamed(StreamingResponse):
    """An answer whose first event is there. Whatever becomes of the connection, the exchange is closed."""

    def __init__(self, exchange: Exchange, first: str | Finished, reply: Reply, record: RequestRecord):
        self._exchange = exchange
        super().__init__(
            self._events(first, reply, record),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)  # the exchange itself watches for a client that hangs up
        finally:
            self._exchange.close()

    async def _events(self, event: str | Finished, reply: Reply, record: RequestRecord) -> AsyncIterator[bytes]:
        try:
            for value in reply.opening():
                yield event_bytes(value)
            while not isinstance(event, Finished):
                yield event_bytes(reply.piece(event))
                event = await anext(self._exchange)
            for value in reply.closing(event):
                yield event_bytes(value)
            yield DONE
            record.finished(event)
        except Exception as error:
            refusal = refusal_of(error)
            record.refused(refusal)
            yield event_bytes(refusal.body())
