"""The engine: load, prefill, step, generate, close. `Engine.step` is the index of everything that happens per token.

One thread owns an engine: the one that opened it makes every MLX call. All state of a request lives in one `Request`,
made new each time; what survives between requests is weights in memory, never predictions. The engine knows nothing of
experiments: it records loads and waits, and lets an observer look at the page cache around each load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from pathlib import Path

import mlx.core as mx
import numpy as np

from edge0 import models
from edge0.errors import Edge0Error, ErrorKind
from edge0.heap import CACHE_STEP_TOKENS, release_freed_memory
from edge0.kernels.choice import MLX, resolve, scale_dtype
from edge0.kernels.heads import KernelHeads
from edge0.kernels.modules import KernelExperts
from edge0.kernels.router import KernelRouter
from edge0.kernels.runner import Kernels
from edge0.kernels.swap import use_kernels
from edge0.lazy import Array, as_mlx, finish, start
from edge0.lora import apply_lora
from edge0.opening import Opening
from edge0.options import EngineOptions
from edge0.plan import MemoryPlan
from edge0.prerouter.heads import Heads
from edge0.prerouter.predictor import Forecast, Predictor
from edge0.prerouter.schedule import LaunchGroup
from edge0.replay import Replay
from edge0.request import Flight, Pass, Request
from edge0.routing import Router
from edge0.sampling import Sampling
from edge0.streaming.bank import Bank
from edge0.streaming.executor import Executor, Lease, Prediction
from edge0.streaming.experts import expert_mlp
from edge0.streaming.prefill import WholeLayers, even_cuts, whole_layers
from edge0.streaming.source import Source
from edge0.streaming.stores import open_source, open_store
from edge0.telemetry.loads import EVALUATE, LAUNCH, LOADS, PREFETCH, Recorder
from edge0.trace import RouteTrace


class Engine:
    """Serves one checkpoint. Use as a context manager, or call `close`."""

    def __init__(
        self,
        directory: Path | str,
        options: EngineOptions | None = None,
        recorder: Recorder | None = None,
        routes: RouteTrace | None = None,
        source: Source | None = None,
    ):
        """Open a checkpoint and load its resident part.

        Args:
            recorder: what is to write down loads and waits; by default one that keeps totals only.
            routes: a trace; every decode step of a request takes its routes from there, whatever the model chooses.
            source: the checkpoint's expert files, opened already as `options.io` says; the engine closes it.

        Raises:
            Edge0Error: whatever the checkpoint, its adapters, the options or the trace are refused for; BANK_TOO_SMALL
                and MEMORY_TOO_SMALL name the floor.
        """
        self.directory, self.options = Path(directory), options or EngineOptions()
        options = self.options
        opening = Opening.of(self.directory, options)
        self.plan = plan = MemoryPlan.of(opening)
        if options.prefill == "whole-layer" and not plan.whole_layer:
            raise Edge0Error(
                ErrorKind.BANK_TOO_SMALL,
                "whole layers were asked for, and the bank cannot hold two of them",
                expected=f"{2 * opening.config.experts} slots of {plan.slot_bytes} bytes",
                found=f"{plan.bank_slots} slots",
                hint="give it more memory, or leave the choice to prefill=auto",
            )
        self.config, self.layout, self.schedule, self.k = opening.config, opening.layout, opening.schedule, opening.k
        self.routes = routes
        if routes is not None:
            routes.check(self.config, self.k)
        self.context_tokens = plan.context
        self.dtype, self._closed = models.activation_dtype(), False
        self.recorder = recorder or Recorder()
        with ExitStack() as opened:  # what fails to open leaves nothing behind
            self._open(opening, source, opened)
            self._opened = opened.pop_all()

    def _open(self, opening: Opening, source: Source | None, opened: ExitStack) -> None:
        """Load what stays in memory, and open what holds the experts."""
        options, kind = self.options, resolve(self.options.kernels)
        if options.memory_bytes is not None:
            opened.callback(mx.set_cache_limit, mx.set_cache_limit(self.plan.cache_bytes))
        scales = scale_dtype(options.kernels, self.dtype)
        self.model = models.load(self.directory, self.config, opening.index, streamed=True, scales=scales)
        if opening.lora is not None:
            dtype = self.dtype if kind == MLX else mx.float16  # as files hold it
            apply_lora(self.model, self.config, opening.lora, dtype)
        self._parameter_bytes = models.parameter_bytes(self.model)
        self.kernels, self.router = None, Router.of(self.config, self.k)
        if kind == MLX:
            self.model.attend_in_pieces()
        else:
            self.kernels = Kernels(kind, options.kernel_threads)
            opened.callback(self.kernels.close)
            use_kernels(self.model, self.kernels, options.hidden_clip)
            self.router = KernelRouter(self.router, self.kernels)
        self.blocks = models.moe_blocks(self.model)
        self.heads = self.predictor = None
        if opening.heads is not None:
            heads, by = (Heads, self.dtype) if self.kernels is None else (KernelHeads, self.kernels)
            self.heads = heads(opening.heads, self.config, self.schedule.owner_groups, by)
            self.predictor = Predictor(self.heads, self.router, self.blocks, options.feature)

        self.source = source or open_source(self.layout.paths, options.io)
        opened.callback(self.source.close)
        self.source.check(self.layout.identities)
        self.store, reader = open_store(
            options, self.layout, self.plan.bank_slots, scales, self.source, self.recorder, self.k
        )
        if reader is not None:
            opened.callback(reader.close)
        experts, later = expert_mlp, None
        if self.kernels is not None:
            experts = KernelExperts(self.kernels, self.store.stacks if isinstance(self.store, Bank) else None)
            later = experts.later
        self.executor = Executor(self.store, self.router, self.recorder, options.native, experts, later)
        for block in self.blocks.values():
            block.executor = self.executor
        release_freed_memory()

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters and heads that stay in memory beside the bank."""
        return self._parameter_bytes + (self.heads.nbytes if self.heads else 0)

    # --- one request -----------------------------------------------------------------------------------------------

    def new_request(self) -> Request:
        """
        Raises:
            Edge0Error: FILE_CHANGED when somebody wrote to the checkpoint since it was opened.
        """
        self.source.check(self.layout.identities)
        return Request(self.model.make_cache())

    def prefill(
        self, request: Request, tokens: Sequence[int], progress: Callable[[int], None] | None = None
    ) -> mx.array:
        """Run a prompt, routing natively; returns the logits `[vocab]` that follow its last token.

        Args:
            progress: told after each chunk how many tokens are done; what it raises ends the prefill.

        Raises:
            Edge0Error: PROMPT_INVALID, READ_FAILED, BANK_TOO_SMALL (another request holds too much), EXPERT_ABSENT,
                ENGINE_CLOSED. The request is of no further use then; the engine is.
        """
        self._check_tokens(request, tokens)
        request.release()  # a prompt that goes on ends what was predicted and remembered
        request.history = {}
        for cut in even_cuts(len(tokens), self.plan.prefill_chunk):
            chunk = tokens[cut]
            with self._pass(request, decoding=False) as running:
                running.whole = self._whole_layers(len(chunk))
                h = self.model.embed(mx.array([[int(token) for token in chunk]]))
                h = self._layers(range(self.config.layers), h, self.model.masks(h, request.cache), request)
                finish(h)
                running.whole.release()
                self._release(running.leases)
                request.tokens = request.prompt_tokens = request.tokens + len(chunk)
                if cut.stop == len(tokens):
                    logits = self._end_prompt(h, running, request)
                elif self._heads_follow:
                    request.history = self.predictor.history(self.schedule.owners, running.executed)
                if len(chunk) >= CACHE_STEP_TOKENS:
                    release_freed_memory()
                if progress is not None:
                    progress(cut.stop)
        return logits

    def step(self, request: Request, token: int) -> mx.array:
        """Decode one token; returns the logits `[vocab]` that follow it (paper section 3.2).

        Raises:
            Edge0Error: PROMPT_INVALID, READ_FAILED, BANK_TOO_SMALL (another request holds too much), EXPERT_ABSENT,
                ENGINE_CLOSED. The request is of no further use then; the engine is.
        """
        self._check_tokens(request, [token])
        with self._pass(request) as running:
            h = self.model.embed(mx.array([[token]]))
            running.masks = self.model.masks(h, request.cache)
            for group in self.schedule.groups:
                self._land(running, request, keep=self._ahead(group, running))
                self._await_reads(group, running)
                h = self._launch(group, h, running, request)
            self._land(running, request, keep=0)
        request.tokens += 1
        if request.tokens % CACHE_STEP_TOKENS == 0:
            release_freed_memory()
        return as_mlx(h[0, -1])

    def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling | None = None, stop: Sequence[int] = ()
    ) -> Iterator[int]:
        """Yield token ids until `max_tokens` or one of `stop` (which is not yielded).

        Raises:
            Edge0Error: PROMPT_INVALID, NUMERIC, and what `prefill` and `step` raise.
        """
        sample = (sampling or Sampling()).sampler()
        request = self.new_request()
        try:
            logits = self.prefill(request, prompt)
            for number in range(max_tokens):
                token = sample(logits)
                if token in stop:
                    return
                yield token
                if number + 1 < max_tokens:
                    logits = self.step(request, token)
        finally:
            request.release()

    def executed_routes(self) -> dict[int, Array]:
        """What the last pass, or the one under way, has executed so far: expert ids `[1, T, K]` by model layer. Of a
        prompt's chunk only the last two tokens are kept."""
        return {layer: executed.indices for layer, executed in self.executor.running.executed.items()}

    def close(self) -> None:
        """End the reader threads and those of the kernels, and close the files."""
        self._closed = True
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- the phases of a step --------------------------------------------------------------------------------------

    @contextmanager
    def _pass(self, request: Request, decoding: bool = True) -> Iterator[Pass]:
        """One forward pass. Decoding takes over the predictions made for this token; if the pass fails, everything
        that it held is let go once no running graph reads it."""
        if self._closed:
            raise Edge0Error(ErrorKind.ENGINE_CLOSED, "the engine was closed", path=self.directory)
        step = request.tokens - request.prompt_tokens if decoding else -1
        advised = self.options.prerouter == "advise"
        running = self.executor.running = Pass(replay=Replay.of(self.routes, step, advised))
        if decoding:
            self.recorder.step += 1
            held, request.predictions = request.predictions, {}
            routing = self.options.prerouter == "route"
            running.predictions, running.advised = (held, {}) if routing else ({}, held)
        try:
            yield running
        except BaseException:
            try:
                running.let_go()
            finally:
                request.release()
            raise

    def _ahead(self, group: LaunchGroup, running: Pass) -> int:
        """Groups that may be in the air while this one is built: one, where no layer will stop the host to look at its
        router. Kernels compute while they are called: nothing is in the air, and heads need not wait for the next."""
        staged = all(layer in running.predictions for layer in group.layers if layer in self.blocks)
        return int(staged and self.kernels is None)

    def _await_reads(self, group: LaunchGroup, running: Pass) -> None:
        """The exposed wait: whatever was predicted for these layers must be in memory before their graph may run."""
        for layer in group.layers:
            if layer in running.predictions:
                with self.recorder.waiting(LOADS, layer):
                    running.predictions[layer].lease.wait()

    def _launch(self, group: LaunchGroup, h: Array, running: Pass, request: Request) -> Array:
        """Build a group's graph, its heads and, after the last layer, the logits; start it without waiting."""
        spent_ns = self.kernels.spent_ns if self.kernels else 0
        h = self._layers(group.layers, h, running.masks, request)
        if group is self.schedule.groups[-1]:
            h = self.model.head(h)
        forecast = self._forecast(group, running, request)
        if self.kernels is not None:  # their calls are what evaluating is to MLX
            self.recorder.waited(EVALUATE, group.layers[-1], self.kernels.spent_ns - spent_ns)
        # The CPU backend holds the caller while its queue is full: that, too, is waiting for computation.
        with self.recorder.waiting(LAUNCH, group.layers[-1]):
            start(h, *(forecast.arrays() if forecast else ()))
        advised = [running.advised.pop(layer).lease for layer in group.layers if layer in running.advised]
        running.flights.append(Flight(group, h, forecast, running.leases + advised))
        running.leases = []
        return h

    def _land(self, running: Pass, request: Request, keep: int) -> None:
        """Harvest the oldest flights until no more than `keep` are in the air."""
        while len(running.flights) > keep:
            self._harvest(running.flights[0], request)
            running.flights.pop(0)

    def _harvest(self, flight: Flight, request: Request) -> None:
        """Wait for a group, free its slots, and start the reads that its heads ask for."""
        forecast = flight.forecast
        with self.recorder.waiting(EVALUATE, flight.group.layers[-1]):
            finish(flight.output, *(forecast.arrays() if forecast else ()))
        self._release(flight.leases)
        if forecast is None:
            return
        request.history |= forecast.history
        ids = np.asarray(forecast.indices)
        for number, owner in enumerate(forecast.owners):
            own = slice(number, number + 1)
            lease = self.store.request(owner + 1, ids[own].flatten(), PREFETCH)
            request.predictions[owner + 1] = Prediction(forecast.indices[own], forecast.weights[own], ids[own], lease)

    @property
    def _heads_follow(self) -> bool:
        """Whether the heads run on a prompt's last token, so that the first step is predicted (8b)."""
        return self.predictor is not None and self.config.family.first_step_predicted

    def _end_prompt(self, h: Array, running: Pass, request: Request) -> mx.array:
        """The logits after a prompt and, where the family wants it, the first predictions."""
        if self._heads_follow:
            for group in self.schedule.groups:
                self._harvest(Flight(group, h, self._forecast(group, running, request), []), request)
        logits = as_mlx(self.model.head(h[:, -1:])[0, -1])
        mx.eval(logits)
        return logits

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _layers(self, layers: range, h: Array, masks: list, request: Request) -> Array:
        modules = self.model.decoder_layers
        for layer in layers:
            h = modules[layer](h, mask=masks[layer], cache=request.cache[layer])
            if self.options.hidden_clip is not None and self.kernels is None:
                h = mx.clip(mx.where(mx.isnan(h), 0, h), -self.options.hidden_clip, self.options.hidden_clip)
        return h

    def _whole_layers(self, tokens: int) -> WholeLayers:
        """The layers of a chunk that are read whole; the first of them starts to be read at once."""
        layers = whole_layers(
            self.store, self.config.moe_layers, self.config.experts, self.k, tokens, self.options.prefill
        )
        return WholeLayers(self.store, layers)

    def _forecast(self, group: LaunchGroup, running: Pass, request: Request) -> Forecast | None:
        if self.predictor is None or not group.owners or running.replay.ended:
            return None
        forced = running.replay.forecast([owner + 1 for owner in group.owners])
        return self.predictor.forecast(group.owners, running.executed, request.history, forced)

    def _release(self, leases: list[Lease]) -> None:
        for lease in leases:
            lease.release()

    def _check_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise Edge0Error(ErrorKind.PROMPT_INVALID, "the prompt is empty", expected="at least one token", found=0)
        wrong = next((t for t in tokens if not isinstance(t, Integral) or not 0 <= t < self.config.vocab), None)
        if wrong is not None:
            raise Edge0Error(
                ErrorKind.PROMPT_INVALID,
                "a token is outside the vocabulary",
                expected=f"an integer of 0 to {self.config.vocab - 1}",
                found=repr(wrong),
            )
        if request.tokens + len(tokens) > self.context_tokens:
            raise Edge0Error(
                ErrorKind.PROMPT_INVALID,
                "the request is longer than the context",
                expected=f"up to {self.context_tokens} tokens",
                found=request.tokens + len(tokens),
            )
