"""Run the quality benchmarks on a checkpoint and its original, in one process of the quality environment.

    python -m experiments.quality.run CHECKPOINT --data DIR --out DIR [--fp DIR_OR_FILE] [--k K] ...

Inference first, then evaluation, then rows: quality.parquet and quality.json in a new folder below --out. A run that
was killed goes on with the questions that are missing; one with another configuration, other weights, other data or
other code begins anew. Exit code 2 and one line where anything failed, and nothing is published then.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from edge0.commands.generate import at_least
from edge0.errors import Edge0Error, ErrorKind, writing
from edge0.families import read_config
from experiments.publish import publish, run_command
from experiments.quality.benchmarks import BENCHMARKS
from experiments.quality.configuration import FP, INT4, SERVER, ArmPlan, configuration, digest_of, plan_arms
from experiments.quality.data import NLTK_DATA, Data, DataRoot, Question
from experiments.quality.journal import Entry
from experiments.quality.preflight import check_packages, preflight
from experiments.quality.rows import rows_of
from experiments.resume import identity_of, working

if TYPE_CHECKING:
    from experiments.quality.compass import Compass

CONFIG = "config.py"
Say = Callable[[str], None]
Said = Sequence[tuple[Question, Entry]]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.quality.run", description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="CHECKPOINT", type=Path, help="an int4 checkpoint")
    parser.add_argument("--data", metavar="DIR", type=Path, required=True, help="data root (edge0 quality data)")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--tier", help="name of the model in the rows (default: that of the directory)")
    parser.add_argument("--fp", metavar="PATH", type=Path, help="the original: a directory, or a kept bf16 file")
    parser.add_argument("--k", type=int, help="experts per token of the checkpoint (default: what the family serves)")
    parser.add_argument("--fp-k", type=int, help="of the original (default: what the model was made with)")
    parser.add_argument("--thinking", action="store_true", help="let a model that can think first do so")
    parser.add_argument("--limit", metavar="TOKENS", type=int, help="of an answer (default: the benchmark's own)")
    parser.add_argument("--benchmarks", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument(
        "--cross-check", choices=list(BENCHMARKS), help="ask this one of `edge0 serve`, too, and compare"
    )
    parser.add_argument("--log", metavar="FILE", type=Path, help="write what is told to this file, too")
    parser.add_argument("--fresh", action="store_true", help="do not go on with an interrupted run")
    return parser


@dataclass(frozen=True)
class Run:
    """What is run. `arms` and `data` by name; `cross_check`: the benchmark that the server is asked, too."""

    tier: str
    arms: Mapping[str, ArmPlan]
    root: DataRoot
    data: Mapping[str, Data]
    configuration: str
    cross_check: str | None
    say: Say

    @classmethod
    def of(cls, options: argparse.Namespace, say: Say) -> Run:
        """
        Raises:
            Edge0Error: FILE_MISSING, CORPUS_INVALID, OPTION_INVALID, and what a checkpoint is refused for.
        """
        check = options.cross_check
        if check not in (None, *options.benchmarks):
            detail = "option cross-check: this benchmark is not run"
            raise Edge0Error(ErrorKind.OPTION_INVALID, detail, expected=options.benchmarks, found=check)
        if options.limit is not None:
            at_least("limit", options.limit, 1)
        arms = plan_arms(options.model, options.fp, options.k, options.fp_k, options.thinking, check is not None)
        root = DataRoot.open(options.data)
        data = {name: root.benchmark(name, options.limit) for name in BENCHMARKS if name in options.benchmarks}
        tier = options.tier or options.model.resolve().name
        text = configuration(tier, arms, data, read_config(options.model).positions)
        return cls(tier, arms, root, data, text, check, say)

    def identity(self, places: Sequence[Path]) -> dict[str, Any]:
        """What an interrupted run must share for this one to go on with its answers. `places`: of the weights."""
        asked = {
            "configuration": self.configuration,
            "data": {name: one.digest for name, one in self.data.items()},
            "opencompass": version("opencompass"),
        }
        found = identity_of(asked, places)
        del found["boot"], found["commit"]  # greedy answers outlive both; the code is compared by its digest
        return found

    def measure(self, folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
        """The rows, and what is to be known of them.

        Args:
            folder: of OpenCompass, made anew: what lies there it would take by its name. Journals lie beside it.

        Raises:
            Edge0Error: SESSION_VOID, OUTPUT_UNWRITABLE, and whatever an arm refuses.
        """
        with writing(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / CONFIG).write_text(self.configuration, encoding="utf-8")
        from experiments.quality.compass import Compass  # OpenCompass: seconds to import

        compass = Compass(folder / CONFIG, self.arms, folder, folder.parent, self.root.path / NLTK_DATA)
        said = self._ask(compass)
        if self.cross_check is not None:
            compare(self.cross_check, said[INT4, self.cross_check], said[SERVER, self.cross_check])
            self.say(f"{self.cross_check}: the server gives the same {len(said[SERVER, self.cross_check])} answers")
        rows, scores = [], {}
        for name, one in self.data.items():
            for arm in (arm for arm in (FP, INT4) if arm in self.arms):
                random.seed(0)  # some of IFBench's checks draw what a question leaves open
                right, scores[name, arm] = compass.score(arm, name, one)
                found = list(rows_of(name, self.arms[arm], said[arm, name], right, self.root.stand_in))
                cut = sum(row["stop"] == "length" for row in found)
                self.say(f"{name} {arm}: {sum(right.values())} of {len(found)} right, {cut} cut at the limit")
                rows += found
        return pd.DataFrame(rows), self._about(said, scores)

    def _ask(self, compass: Compass) -> dict[tuple[str, str], Said]:
        """(arm, benchmark) to its answers; one arm is open at a time."""
        said = {}
        for arm in self.arms:
            with compass.model(arm) as model:
                if len(model.journal) or model.journal.broken:
                    broken = f", {model.journal.broken} lines could not be read" if model.journal.broken else ""
                    self.say(f"{arm}: {len(model.journal)} answers are there already{broken}")
                for name in [self.cross_check] if arm == SERVER else self.data:
                    said[arm, name] = compass.ask(model, arm, name, self.data[name])
                    seconds = sum(entry.seconds for _, entry in said[arm, name])
                    self.say(f"{name} {arm}: {len(said[arm, name])} answers in {seconds:.0f} s")
        return said

    def _about(self, said: Mapping[tuple[str, str], Said], scores: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        seconds = {key: sum(entry.seconds for _, entry in entries) for key, entries in said.items()}
        check = self.cross_check
        return {
            "arms": {name: {"k": arm.k, "what": arm.words} for name, arm in self.arms.items() if name != SERVER},
            "opencompass": version("opencompass"),
            "stand_in": self.root.stand_in,
            "data": {name: one.digest for name, one in self.data.items()},
            "questions": {name: len(one.questions) for name, one in self.data.items()},
            "limits": {name: one.limit for name, one in self.data.items()},
            "metrics": {name: BENCHMARKS[name].metric for name in self.data},
            "seconds": _by_benchmark(seconds),
            "opencompass_scores": _by_benchmark({(arm, name): value for (name, arm), value in scores.items()}),
            "cross_check": None
            if check is None
            else {"benchmark": check, "route": self.arms[SERVER].words, "equal": len(said[SERVER, check])},
        }


def compare(benchmark: str, ours: Said, theirs: Said) -> None:
    """
    Raises:
        Edge0Error: SESSION_VOID where the server answered something else.
    """
    for (question, here), (_, there) in zip(ours, theirs, strict=True):
        if here.answer != there.answer:
            raise Edge0Error(
                ErrorKind.SESSION_VOID,
                f"{BENCHMARKS[benchmark].title}: the server answers otherwise than the engine in this process",
                tensor=question.id,
                expected=repr(here.answer.text[:80]),
                found=repr(there.answer.text[:80]),
            )


def run(options: argparse.Namespace, say: Say) -> None:
    """
    Raises:
        Edge0Error: as `Run.of`, `preflight` and `Run.measure`; OUTPUT_UNWRITABLE.
    """
    check_packages()
    asked = Run.of(options, say)
    if not asked.root.stand_in:
        say(
            "\n".join(f"{one.benchmark.title}: {len(one.rows)} questions, {one.version}" for one in asked.data.values())
        )
    found = asked.identity([options.model, *([] if options.fp is None else [options.fp])])
    with tempfile.TemporaryDirectory() as cache, working(options.out, found, options.fresh, say) as work:
        os.environ.update(_environment(asked.root.path, Path(cache)))  # before the first import of what reads them
        preflight(asked.root, asked.data)
        rows, about = asked.measure(work.folder / f"opencompass-{digest_of(found)}")
        about = {"tier": asked.tier, "model": str(options.model)} | about
        publish(options.out, "quality", rows, options.model, about)
        work.remove()
    say(f"{len(rows)} rows in the newest folder of {options.out}")


def _environment(root: Path, cache: Path) -> dict[str, str]:
    """What OpenCompass and its libraries are told by environment variables alone: where data lies, and no network."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return offline | {"COMPASS_DATA_CACHE": str(root.resolve()), "HF_HOME": str(cache)}


def _by_benchmark(values: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    """(arm, benchmark) to a value, as benchmark to arm to it."""
    found: dict[str, dict[str, Any]] = {}
    for (arm, name), value in values.items():
        found.setdefault(name, {})[arm] = value
    return found


def _sayer(log: Path | None) -> Say:
    """Tells on stderr and, where there is one, in a file.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE.
    """
    if log is not None:
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if log is not None:
            with writing(log), log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    return say


def main() -> int:
    options = arguments().parse_args()
    return run_command(lambda: run(options, _sayer(options.log)))


if __name__ == "__main__":
    sys.exit(main())
