"""A session: all arms of one experiment on one machine, in rounds of rotated order, each arm a fresh process.

    python -m experiments.session --model DIR --tier mini-35b --root DIR [...]

Every arm replays one token sequence, sampled once at the start. The first arm at its largest K runs twice in each round
(an A/A pair), and the very first run is repeated at the end (drift). Writes raw rows only; what they mean is said by
`analysis`, from the files. The folder appears under its name when it is complete; until then a session that was
interrupted keeps its finished rounds, and the same command goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from experiments.alone import alone
from experiments.arms import ARMS
from experiments.finished import reuse, write_json
from experiments.gather import gather
from experiments.host.storage import lower_cache
from experiments.options import Command, SessionOptions, parse
from experiments.plan import Run, plan
from experiments.preflight import Ready, bank_slots, preflight
from experiments.processes import run_python, run_python_limited
from experiments.resume import Work, identity, working
from experiments.rows import ROW_KINDS
from experiments.run_arm import RunSpec, failed, write_row

INTERRUPTED = 130


class Session:
    """One session while it is measured."""

    def __init__(self, options: SessionOptions, ready: Ready, work: Work, console: Console):
        self.options, self.ready, self.work, self.console = options, ready, work, console
        self.runs = plan(options)

    def measure(self) -> Path:
        """Run what is not there yet, and publish all of it; returns the session's folder.

        Raises:
            Edge0Error: SESSION_VOID when an arm process failed (its message is kept) or every run did. OSError passes.
        """
        about = self._about()
        tokens = self._tokens()
        rows = self._rows(tokens, about["lower_cache"])
        try:
            gather(self.options, self.ready, self.work, rows, about)
        except Edge0Error:
            self.work.remove()  # no run speaks: there is nothing to go on with
            raise
        return self.work.publish()

    def _about(self) -> dict[str, Any]:
        """What is found out once, and holds for the whole session."""
        path = self.work.folder / "about.json"
        if not path.exists():
            state = lower_cache(self.options.model)
            write_json(path, {"lower_cache": state.verdict, "lower_cache_reason": state.reason})
        return json.loads(path.read_text())

    def _tokens(self) -> list[int]:
        """The sequence that all arms replay, sampled by the model itself, natively routed, in a process of its own."""
        options, path = self.options, self.work.folder / "tokens.json"
        if not path.exists():
            count = options.warmup_steps + options.timed_steps
            partial = path.with_suffix(".partial")
            numbers = [str(number) for number in (options.prompt_tokens, count, options.seed)]
            run_python(
                ["-m", "experiments.sample_tokens", options.model, *numbers, str(partial)],
                "sampling the token sequence",
                options.run_timeout_s,
            )
            partial.replace(path)
        return json.loads(path.read_text())["tokens"]

    def _rows(self, tokens: list[int], lower: str) -> list[dict[str, Any]]:
        kept = self.work.keep_whole_rounds(self.runs)
        if kept:
            self.say(f"kept: {kept} of {len(self.runs)} runs, {self.work.rounds_kept(self.runs)} whole rounds")
        rows = []
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task("starting", total=len(self.runs), completed=kept)
            for order, run in enumerate(self.runs):
                spec = self._spec(order, run, tokens, lower)
                if order >= kept:
                    progress.update(
                        task, description=f"round {run.round + 1}/{self.options.rounds} {run.arm} K={run.k}"
                    )
                    self._run(spec)
                row = json.loads((self.work.folder / f"{spec.run_id}.json").read_text())
                rows.append(dataclasses.asdict(run) | {"order": order} | row)
                if order >= kept:
                    speed = "failed" if row["tok_s"] is None else f"{row['tok_s']:.2f} tok/s"
                    self.say(f"{spec.run_id}: {speed}" + (f" void: {row['void_reason']}" if row["void"] else ""))
                    progress.advance(task)
        return rows

    def _spec(self, order: int, run: Run, tokens: list[int], lower: str) -> RunSpec:
        options = self.options
        prompt, rest = tokens[: options.prompt_tokens], tokens[options.prompt_tokens :]
        return RunSpec(
            run_id=run.name(order),
            arm=run.arm,
            k=run.k,
            model=options.records if ARMS[run.arm].records else options.model,
            condition=options.condition,
            prompt=prompt,
            warmup_tokens=rest[: options.warmup_steps],
            timed_tokens=rest[options.warmup_steps :],
            bank_slots=bank_slots(options, self.ready.layout, run.arm),
            lora=options.lora,
            adapter_k=options.adapter_k,
            launch_groups=options.launch_groups,
            reader_threads=options.reader_threads,
            probe_every=options.probe_every,
            seed=options.seed,
            budget_by=self.ready.budget_by,
            memory_limit_bytes=options.memory_limit_bytes,
            trace=options.trace,
            kernels=options.kernels,
            gguf=options.gguf,
            peers=options.peers,
            lower_cache=lower,
        )

    def _run(self, spec: RunSpec) -> None:
        """Run one arm in its process; one that its memory limit kills is void like one that fails by itself."""
        folder = self.work.folder
        path = folder / f"{spec.run_id}.spec.json"
        path.write_text(json.dumps(dataclasses.asdict(spec)))
        arguments = ["-m", "experiments.run_arm", str(path), str(folder)]
        what = f"arm {spec.arm} at K={spec.k}"
        timeout_s, large = self.options.run_timeout_s, ARMS[spec.arm].large_pages
        if spec.budget_by != "cgroup" and spec.memory_limit_bytes is None:
            run_python(arguments, what, timeout_s, large)
            return
        try:
            run_python_limited(arguments, what, spec.memory_limit_bytes, timeout_s, large)
        except Edge0Error as error:
            if error.kind is not ErrorKind.MEMORY_TOO_SMALL:
                raise
            for kind in ROW_KINDS:  # it may have been killed while it wrote them
                (folder / f"{spec.run_id}.{kind}.parquet").unlink(missing_ok=True)
            write_row(failed(spec, error), folder)

    def say(self, line: str) -> None:
        say(self.console, line)

    def say_what_is_kept(self) -> None:
        """After an interruption: how to go on. Where no round was finished, nothing is kept."""
        rounds = self.work.rounds_kept(self.runs) if self.work.folder.exists() else 0
        if rounds:
            kept = f"{rounds} of {self.options.rounds} rounds are kept in {self.work.folder}"
            self.say(f"{kept}: the same command goes on from there, --fresh begins anew")
        else:
            self.work.remove()


def run_session(options: SessionOptions, root: Path, console: Console, fresh: bool = False) -> Path:
    """Run everything and write the session folder under `root`; returns it. `root`/latest.json names it then.

    Raises:
        Edge0Error: from `preflight`; OUTPUT_UNWRITABLE; SESSION_VOID. Finished rounds are kept then.
    """
    ready = preflight(options)
    with working(root, identity(options, ready.budget_by), fresh, lambda line: say(console, line)) as work:
        session = Session(options, ready, work, console)
        try:
            return work.announce() if work.published else session.measure()
        except BaseException as error:
            session.say_what_is_kept()
            if isinstance(error, OSError):
                detail = f"cannot be written ({error.strerror or error})"
                raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, detail, path=error.filename or root) from error
            raise


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    console = Console(stderr=True, record=True)
    code, log = 0, None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running arm ends with its session
    try:
        command = parse(sys.argv[1:])
        if command.log is not None:
            _writable(command.log)
            log = command.log
        _obey(command, console)
    except Edge0Error as error:
        say(console, f"edge0: {error}")
        code = EXIT_CODE
    except KeyboardInterrupt:
        say(console, "edge0: interrupted")
        code = INTERRUPTED
    if log is not None:
        log.write_text(console.export_text())
    return code


def _obey(command: Command, console: Console) -> None:
    if command.reuse:
        folder, differs = reuse(command.options, command.root)
        say(console, f"reused session {folder}: nothing was measured" + (f" (it has {differs})" if differs else ""))
        return
    started = time.monotonic()
    with alone(f"{command.options.experiment} on {command.options.tier}"):
        folder = run_session(command.options, command.root, console, command.fresh)
    say(console, f"session of {time.monotonic() - started:.0f} s in {folder}")


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise Edge0Error(ErrorKind.OUTPUT_UNWRITABLE, f"cannot be written ({error.strerror})", path=path) from error


if __name__ == "__main__":
    sys.exit(main())
