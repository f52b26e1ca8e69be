"""One client waiting for one answer: what the tokenizer, the engine, the clock and the client say, in one inbox, in
order.

Lives in the event loop; the engine thread reaches it only through `call_soon_threadsafe`. The clock and the client end
the work itself, too: whoever iterates may be held up by a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive

from edge0.serving.completion import Finished, Order
from edge0.serving.refusals import DeadlinePassed, Gone
from edge0.serving.worker import Event, Job, Worker


class Exchange:
    """Asynchronous iterator over the pieces of an answer and `Finished`. `close` it whatever happens.

    Iterating raises what ended the answer instead: what `prepare` raises, Edge0Error, DeadlinePassed, Gone, QueueFull,
    Stopped.

    Args:
        prepare: makes the order that the worker then gets.
        receive: the client's ASGI channel, its body read.
        seconds: until DeadlinePassed, counted from now. `deadline`: that moment on the event loop's clock.
    """

    def __init__(self, worker: Worker, prepare: Callable[[], Awaitable[Order]], receive: Receive, seconds: float):
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + seconds
        self._loop, self._worker, self._ended = loop, worker, False
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._job: Job | None = None
        self._timer = loop.call_at(self.deadline, lambda: self._give_up(DeadlinePassed()))
        self._watcher = loop.create_task(self._watch(receive))
        self._submission = loop.create_task(self._submit(prepare))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._give_up(Gone())

    async def _submit(self, prepare: Callable[[], Awaitable[Order]]) -> None:
        try:
            self._job = Job(await prepare(), self._deliver)
            self._worker.submit(self._job)
        except Exception as error:
            self._inbox.put_nowait(error)

    def _deliver(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, event)

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
        self._cancel()

    def _give_up(self, error: Exception) -> None:
        self._cancel()
        self._inbox.put_nowait(error)

    def _cancel(self) -> None:
        self._submission.cancel()
        if self._job is not None:
            self._worker.cancel(self._job)
