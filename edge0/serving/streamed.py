"""A response that goes out piece by piece, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from edge0.serving.completion import Finished
from edge0.serving.exchange import Exchange
from edge0.serving.metrics import RequestRecord
from edge0.serving.refusals import DeadlinePassed, Gone, refusal_of
from edge0.serving.replies import DONE, Reply, event_bytes

LAST_EVENT_SECONDS = 2.0  # after the deadline, for the event that tells of it to go out


class Streamed(StreamingResponse):
    """An answer whose first event is there. Whatever becomes of the connection, the exchange is closed and the record
    says how it ended."""

    def __init__(self, exchange: Exchange, first: str | Finished, reply: Reply, record: RequestRecord):
        self._exchange, self._record = exchange, record
        super().__init__(
            self._events(first, reply),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The exchange itself watches for a client that hangs up. `send` waits for one that does not read, forever:
        such a response is left incomplete, so that the server closes the connection."""
        try:
            async with asyncio.timeout_at(self._exchange.deadline + LAST_EVENT_SECONDS):
                await self.stream_response(send)
        except TimeoutError:
            self._record.refused(refusal_of(DeadlinePassed()))
        finally:
            self._exchange.close()
            self._record.refused(refusal_of(Gone()))  # which counts only where nothing was recorded before

    async def _events(self, event: str | Finished, reply: Reply) -> AsyncIterator[bytes]:
        try:
            for value in reply.opening():
                yield event_bytes(value)
            while not isinstance(event, Finished):
                yield event_bytes(reply.piece(event))
                event = await anext(self._exchange)
            for value in reply.closing(event):
                yield event_bytes(value)
            yield DONE
            self._record.finished(event)
        except Exception as error:
            refusal = refusal_of(error)
            self._record.refused(refusal)
            yield event_bytes(refusal.body())
