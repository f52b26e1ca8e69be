"""One client waiting for one answer: what the engine, the clock and the client say, in one inbox, in order.

Lives in the event loop; the engine thread reaches it only through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from edge0.serving.completion import Finished, Order
from edge0.serving.refusals import DeadlinePassed, Gone
from edge0.serving.worker import Event, Job, Worker


class Exchange:
    """Asynchronous iterator over the pieces of an answer and `Finished`. `close` it whatever happens.

    Iterating raises what ended the answer instead: Edge0Error, DeadlinePassed, Gone, Stopped.

    Args:
        receive: the client's ASGI channel, its body read.
        seconds: until DeadlinePassed.

    Raises:
        QueueFull, Stopped
    """

    def __init__(self, worker: Worker, order: Order, receive: Receive, seconds: float):
        loop = asyncio.get_running_loop()
        self._worker, self._ended = worker, False
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._job = Job(order, lambda event: loop.call_soon_threadsafe(self._inbox.put_nowait, event))
        worker.submit(self._job)
        self._timer = loop.call_later(seconds, self._inbox.put_nowait, DeadlinePassed())
        self._watcher = loop.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._inbox.put_nowait(Gone())

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> str | Finished:
        if self._ended:
            raise StopAsyncIteration
        event = await self._inbox.get()
        self._ended = not isinstance(event, str)
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        """Stop waiting. If the answer is not complete, it is not written any further."""
        self._timer.cancel()
        self._watcher.cancel()
        self._worker.cancel(self._job)
