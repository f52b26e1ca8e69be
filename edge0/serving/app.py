"""The routes: completions and chat completions, whole or streamed, models, health and metrics.

One event loop runs all of this and never touches MLX. Errors that happen before the first piece of text have a status;
after that, a stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge0.serving.completion import Finished, Order
from edge0.serving.exchange import Exchange
from edge0.serving.guard import KeyGuard
from edge0.serving.metrics import Metrics, RequestRecord
from edge0.serving.prepare import Limits, prepare
from edge0.serving.refusals import Gone, Refusal, refusal_of
from edge0.serving.replies import Reply
from edge0.serving.requests import CompletionRequest, parse_request
from edge0.serving.streamed import Streamed
from edge0.serving.vocabulary import Vocabulary
from edge0.serving.worker import Worker

BODY_SECONDS = 30  # to send a body in


@dataclass(frozen=True)
class ServiceOptions:
    """How one checkpoint is offered. `hosts`: names that requests may call this server by; None: any."""

    model: str
    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 1 << 20
    max_tokens: int | None = None
    request_seconds: float = 600.0


class Service:
    """The handlers of one server. The worker is started before."""

    def __init__(self, worker: Worker, vocabulary: Vocabulary, options: ServiceOptions):
        engine = worker.engine
        self.worker, self.vocabulary, self.options, self.metrics = worker, vocabulary, options, Metrics(worker)
        self._limits = Limits(engine.config.vocab, engine.context_tokens, options.max_tokens)
        self._created = int(time.time())
        self._tokenizer = ThreadPoolExecutor(1, "edge0-tokenizer")  # one thread: tokenizers do not like two
        self._tokenizer_free = asyncio.Lock()  # held while that thread works
        self._preparing = 0  # requests that have the tokenizer or wait for it

    def app(self) -> Starlette:
        guards = []
        if self.options.hosts is not None:
            guards.append(Middleware(TrustedHostMiddleware, self.options.hosts, www_redirect=False))
        if self.options.api_key is not None:
            guards.append(Middleware(KeyGuard, self.options.api_key, exempt="/healthz"))
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._plain, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/healthz", self._health),
                Route("/metrics", self._tell_metrics),
            ],
            middleware=guards,
            exception_handlers={HTTPException: _refuse, Refusal: _refuse, Exception: _refuse},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self._tokenizer.shutdown(wait=False)
        await asyncio.to_thread(self.worker.close)

    async def _health(self, request: Request) -> Response:
        alive = self.worker.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _tell_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._described())

    def _described(self) -> dict:
        return {"id": self.options.model, "object": "model", "created": self._created, "owned_by": "edge0"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.model:
            message = f"this server serves {self.options.model} alone"
            raise Refusal(404, "invalid", message, code="model_not_found", param="model")

    # --- completions -----------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, chat=True)

    async def _plain(self, request: Request) -> Response:
        return await self._complete(request, chat=False)

    async def _complete(self, request: Request, chat: bool) -> Response:
        record = self.metrics.request(request.url.path)
        try:
            wanted = parse_request(await self._body(request), chat)
            self._check_model(wanted.model)
            prepare_order = partial(self._order, wanted)
            exchange = Exchange(self.worker, prepare_order, request.receive, self.options.request_seconds)
            reply = Reply(self.options.model, chat, wanted.include_usage)
            return await self._answer(exchange, reply, wanted.stream, record)
        except asyncio.CancelledError:
            record.refused(refusal_of(Gone()))
            raise
        except Exception as error:
            refusal = refusal_of(error)
            record.refused(refusal)
            raise refusal from error

    async def _answer(self, exchange: Exchange, reply: Reply, stream: bool, record: RequestRecord) -> Response:
        try:
            event = await anext(exchange)  # what fails before it still gets a status
            if stream:
                return Streamed(exchange, event, reply, record)
            pieces = []
            while not isinstance(event, Finished):
                pieces.append(event)
                event = await anext(exchange)
        except BaseException:
            exchange.close()
            raise
        exchange.close()
        record.finished(event)
        return JSONResponse(reply.whole("".join(pieces), event))

    async def _order(self, wanted: CompletionRequest) -> Order:
        """Whoever waits for the tokenizer has a place in the queue already. One who leaves frees it at once; the thread
        cannot be stopped, and the next one waits until it has finished.

        Raises:
            QueueFull, Stopped, and what `prepare` raises.
        """
        self.worker.check_room(self._preparing)
        self._preparing += 1
        try:
            await self._tokenizer_free.acquire()
            work = partial(prepare, wanted, self.vocabulary, self._limits)
            prepared = asyncio.get_running_loop().run_in_executor(self._tokenizer, work)
            prepared.add_done_callback(lambda _: self._tokenizer_free.release())
            return await asyncio.shield(prepared)
        finally:
            self._preparing -= 1

    async def _body(self, request: Request) -> bytes:
        limit, body = self.options.max_body_bytes, bytearray()
        too_large = Refusal(413, "invalid", f"the body is larger than {limit} bytes", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise Refusal(408, "invalid", "the body did not come in time", code="body_late") from error
        except ClientDisconnect as error:
            raise Gone from error
        return bytes(body)


async def _refuse(request: Request, error: Exception) -> Response:
    return refusal_of(error).response()
