"""The file side of the analysis: reads one session folder into rows, and publishes finished files.

Knows nothing of tables. A session folder holds session.json, runs.parquet, steps.parquet and loads.parquet. Void runs
are set apart here, once, so that no number downstream can come from one; two sessions in one folder are refused,
because a ratio between sessions compares two moods of a machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.statistics import CONFIDENCE, NO_RATIO, Ratio, paired_ratio, t_quantile
from analysis.units import MIB as MIB
from analysis.units import require

EXIT_CODE = 2
POINTER = "latest.json"
ARMS = ("ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap")
# Arm over base: the prerouter's gain with one way of reading, then the gain of the way of reading.
GAIN_PAIRS = (("prerouter", "ondemand"), ("prerouter-mmap", "ondemand-mmap"))
PAIRS = (*GAIN_PAIRS, ("ondemand", "ondemand-mmap"), ("prerouter", "prerouter-mmap"))
# The same from a repacked copy past the page cache, which no table of the paper's knows.
DIRECT_ARMS = ("ondemand-direct", "prerouter-direct")
DIRECT_PAIRS = (DIRECT_ARMS[::-1], ("ondemand-direct", "ondemand"), ("prerouter-direct", "prerouter"))
GAIN_BASES = dict((*GAIN_PAIRS, DIRECT_PAIRS[0]))  # what each prerouter arm gains over
# (K, arm, base) to its ratio; arm = base is the A/A pair.
PairRatios = dict[tuple[int, str, str], Ratio]
ROLES = ("arm", "aa", "drift")
# A session whose first run, repeated at the end, differs by more than a factor between these has no verdict; which
# factor depends on the noise that its own A/A pairs show.
DRIFT_LIMITS = (1.10, 1.25)
NO_VERDICT = "no verdict"

RUN_COLUMNS = (
    "session run_id order round role arm k tier condition tok_s timed_steps warmup_steps bank_bytes bank_slots "
    "resident_bytes alloc_peak_bytes alloc_active_bytes rss_anon_bytes rss_file_bytes rss_peak_bytes "
    "cached_before_bytes cached_after_bytes budget_bytes dropped token_hash void void_reason"
).split()
STEP_MEANS = (
    "step_ms wait_ms wait_predicted_ms wait_gate_ms compute_ms loads loads_predicted hits asked_bytes cold_bytes "
    "device_bytes load_busy_ms load_busy_predicted_ms"
).split()
STEP_COLUMNS = ["run_id", "step", "timed", *STEP_MEANS, "dropped"]
LOAD_COLUMNS = (
    "run_id step layer expert purpose predicted_layer asked_bytes cold_bytes inflight_bytes device_bytes submit_ns "
    "start_ns end_ns"
).split()
BOOLEANS = {"void", "timed", "predicted_layer"}


@dataclass(frozen=True)
class SessionInfo:
    """What session.json says of the whole session. A key that it lacks is None (`host`: empty).

    `expert_bytes` are the bytes of all routed experts of the checkpoint, `budget_bytes` the page cache left to them.
    `lower_cache` is "suspected" where a host below this one may keep the file; `resumed` is set where the session was
    taken up again after it was killed; `trace` names the file of routes that all arms replayed.
    """

    session: str | None = None
    machine: str | None = None
    tier: str | None = None
    experiment: str | None = None
    condition: str | None = None
    k_values: list[int] | None = None
    arms: list[str] | None = None
    rounds: int | None = None
    host: dict[str, Any] = field(default_factory=dict)
    family: str | None = None
    commit: str | None = None
    created: str | None = None
    budget_bytes: int | None = None
    expert_bytes: int | None = None
    bank_bytes: int | None = None
    lower_cache: str | None = None
    resumed: Any = None
    trace: str | None = None


@dataclass(frozen=True)
class Drift:
    """The session's first run against its repeat at the end: `ratio` is repeat over first (NaN: not measured)."""

    ratio: float
    void_verdict: bool
    text: str

    @property
    def mark(self) -> str:
        """`no verdict: drift 1.18x`, "" where the session has a verdict: beside whatever is made of it."""
        if not self.void_verdict:
            return ""
        return f"{NO_VERDICT}: drift {'not comparable' if math.isnan(self.ratio) else f'{self.ratio:.2f}x'}"


@dataclass(frozen=True)
class Session:
    """One session's rows.

    `runs`: valid runs, one row each, with the runs.parquet columns, `X_per_step` for each column X of `STEP_MEANS`
    (mean over the run's timed steps) and `cold_share` (cold over asked bytes, timed steps). `all_runs`: the same rows
    with the void ones, for counts that must not be lost with a run. `void`: the void runs. `loads`: rows of valid runs.
    """

    info: SessionInfo
    runs: pd.DataFrame
    all_runs: pd.DataFrame
    void: pd.DataFrame
    steps: pd.DataFrame
    loads: pd.DataFrame

    def cell(self, arm: str, k: int, role: str = "arm") -> pd.DataFrame:
        """Valid runs of one arm at one K in one role, one row per round, indexed by round."""
        rows = self.runs[(self.runs["arm"] == arm) & (self.runs["k"] == k) & (self.runs["role"] == role)]
        return rows.set_index("round").sort_index()

    @property
    def name(self) -> str:
        """The session's name: session.json's, else the one that its rows agree on."""
        return self.info.session or str(self.all_runs["session"].iloc[0])

    @property
    def condition(self) -> str:
        """The page-cache condition that every run of the session shares."""
        return str(self.all_runs["condition"].iloc[0])

    @property
    def kernels(self) -> list[str]:
        """What computed in its valid runs; empty in rows of old sessions, which do not say."""
        return sorted(set(self.runs.get("kernels", ())))

    @property
    def void_reasons(self) -> list[str]:
        """Which runs are void and why their numbers are not used, one line for all of an arm that share a reason."""
        lines = []
        for (role, arm, k, reason), runs in self.void.groupby(["role", "arm", "k", "void_reason"], sort=False):
            rounds = f"round{'s' * (len(runs) > 1)} {', '.join(map(str, runs['round']))}"
            which = runs["run_id"].iloc[0] if len(runs) == 1 else f"{len(runs)} runs"
            lines.append(f"{which} ({role} {arm}, K={k}, {rounds}): {reason or 'no reason given'}")
        return lines

    def drift(self) -> Drift:
        """Whether the machine changed during the session: its first run against the run that repeats it at the end."""
        repeats = self.all_runs[self.all_runs["role"] == "drift"]
        if repeats.empty:
            return Drift(math.nan, False, "not measured in this session")
        repeat = repeats.iloc[-1]
        first = self.all_runs[self.all_runs["role"] == "arm"].iloc[0]
        what = f"{repeat['arm']} at K={repeat['k']}, first run of the session against its repeat at the end"
        void = [run["void_reason"] or "no reason given" for run in (first, repeat) if run["void"]]
        if void:
            return Drift(math.nan, True, f"{what}: not comparable ({void[0]}), so the session has no verdict")
        if (first["arm"], first["k"]) != (repeat["arm"], repeat["k"]):
            raise ValueError(
                f"session {self.name}: the drift run {repeat['run_id']} repeats another run than the first"
            )
        # The first round's runs of this arm (itself and its A/A twin) against the repeat.
        alike = self.runs[(self.runs["arm"] == first["arm"]) & (self.runs["k"] == first["k"])]
        early = alike.loc[(alike["round"] == first["round"]) & (alike["role"] != "drift"), "tok_s"]
        ratio = float(repeat["tok_s"] / np.exp(np.log(early).mean()))
        limit = self._drift_limit(alike, len(early))
        drifted = not 1 / limit <= ratio <= limit
        verdict = "drifted, so the session has no verdict" if drifted else "no drift"
        return Drift(ratio, drifted, f"{what}: {ratio:.2f}x, {verdict} (limit {limit:.2f}x either way)")

    def _drift_limit(self, alike: pd.DataFrame, early: int) -> float:
        """How far one run may lie from the mean of `early` others: 95% of what A/A pairs show, within bounds."""
        twins = alike[alike["role"] == "aa"].set_index("round")["tok_s"]
        runs = alike[alike["role"] == "arm"].set_index("round")["tok_s"]
        logs = np.log(twins / runs).dropna()
        if len(logs) < 2:
            return DRIFT_LIMITS[0]
        noise = float(logs.std(ddof=1) / math.sqrt(2)) * t_quantile(len(logs), (1 + CONFIDENCE) / 2)
        return float(np.clip(math.exp(noise * math.sqrt(1 + 1 / early)), *DRIFT_LIMITS))


def paired(left: pd.DataFrame, right: pd.DataFrame, column: str = "tok_s") -> Ratio:
    """Ratio of two cells over the rounds valid in both; `NO_RATIO` (n = 0) when they share none."""
    shared = left.index.intersection(right.index)
    if shared.empty:
        return NO_RATIO
    return paired_ratio(left.loc[shared, column].to_numpy(), right.loc[shared, column].to_numpy())


def planned(session: Session, arms: Collection[str]) -> pd.DataFrame:
    """The runs of arms, void ones too, without A/A and drift runs. ValueError for an arm that is none of `arms`."""
    runs = session.all_runs[session.all_runs["role"] == "arm"]
    strange = sorted(set(runs["arm"]) - set(arms))
    if strange:
        raise ValueError(f"session {session.name}: arm {strange[0]!r} is not one of {', '.join(arms)}")
    return runs


def the_k(session: Session) -> int:
    """The one K of the session. ValueError where it has several."""
    ks = sorted(set(session.all_runs["k"]))
    if len(ks) > 1:
        raise ValueError(f"session {session.name}: expected one K, found {', '.join(map(str, ks))}")
    return int(ks[0])


def pair_ratios(session: Session, pairs: Iterable[tuple[str, str]] = PAIRS) -> PairRatios:
    """tok/s ratios of every one of `pairs` that the session ran, K by K, then of the A/A pairs."""
    planned = session.all_runs
    cells = set(planned.loc[planned["role"] == "arm", ["arm", "k"]].itertuples(index=False, name=None))
    ratios = {
        (k, arm, base): paired(session.cell(arm, k), session.cell(base, k))
        for k in sorted({k for _, k in cells})
        for arm, base in pairs
        if (arm, k) in cells and (base, k) in cells
    }
    repeated = planned.loc[planned["role"] == "aa", ["arm", "k"]].drop_duplicates().sort_values(["k", "arm"])
    for arm, k in repeated.itertuples(index=False, name=None):
        ratios[k, arm, arm] = paired(session.cell(arm, k, "aa"), session.cell(arm, k))
    return ratios


def named(path: Path, document: str) -> Path:
    """`path`, or where it is a latest.json, the file `document` of the folder beside it that it names.

    Raises ValueError, one line.
    """
    if path.name != POINTER:
        return path
    pointer = read_json(path)
    if not isinstance(pointer, dict) or not pointer.get("session"):
        raise ValueError(f"{path}: names no session")
    return path.parent / str(pointer["session"]) / document


def load_session(folder: Path) -> Session:
    """Read and check one session folder, its session.json, or the one that a `latest.json` beside the folders names.

    Raises ValueError, one line naming the file: unreadable file, missing column, several sessions, rows of a run that
    runs.parquet does not know, two runs in one place of the plan, a valid run that lacks timed steps, no valid run of
    an arm.
    """
    if folder.suffix == ".json":
        folder = named(folder, "session.json").parent
    info = _read_info(folder / "session.json")
    runs = read_rows(folder / "runs.parquet", RUN_COLUMNS)
    steps = read_rows(folder / "steps.parquet", STEP_COLUMNS)
    loads = read_rows(folder / "loads.parquet", LOAD_COLUMNS)
    _check_runs(folder / "runs.parquet", runs, info)
    for name, rows in (("steps.parquet", steps), ("loads.parquet", loads)):
        strangers = sorted(set(rows["run_id"]) - set(runs["run_id"]))
        if strangers:
            raise ValueError(f"{folder / name}: holds run {strangers[0]}, which runs.parquet does not; mixed sessions?")
    runs = _with_step_means(runs.sort_values("order", ignore_index=True), steps)
    valid = runs[~runs["void"]].reset_index(drop=True)
    if valid[valid["role"] == "arm"].empty:
        raise ValueError(f"{folder / 'runs.parquet'}: no valid run of an arm; first reason: {_reason(runs)}")
    for run in valid[valid["timed_steps_found"] != valid["timed_steps"]].itertuples():
        found = f"expected {run.timed_steps} timed steps of run {run.run_id}, found {run.timed_steps_found}"
        raise ValueError(f"{folder / 'steps.parquet'}: {found}")
    kept = set(valid["run_id"])
    void = runs[runs["void"]].reset_index(drop=True)
    return Session(info, valid, runs, void, steps[steps["run_id"].isin(kept)], loads[loads["run_id"].isin(kept)])


@contextlib.contextmanager
def publishing(out: Path) -> Iterator[Path]:
    """A scratch folder inside `out`; on a clean exit each file in it is renamed into `out`, else all of it vanishes.

    So a reader sees old files or new ones, never half of one, and a failure leaves `out` as it was. OSError passes.
    """
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=out))
    try:
        yield scratch
        for path in sorted(scratch.iterdir()):
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not existed and not any(out.iterdir()):
            out.rmdir()


def write_tables(scratch: Path, text: str, **tables: pd.DataFrame) -> None:
    """Write table.md and each table as NAME.csv into a folder of `publishing`, alike for every target."""
    for name, rows in tables.items():
        write_csv(rows, scratch / f"{name}.csv")
    (scratch / "table.md").write_text(text, encoding="utf-8")


def write_csv(rows: pd.DataFrame, path: Path) -> None:
    """Rows without their index; numbers to six digits."""
    rows.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], right_from: int | None = None) -> str:
    """A Markdown table; columns from index `right_from` on are aligned right."""
    first = len(header) if right_from is None else right_from
    marks = ["---" if column < first else "---:" for column in range(len(header))]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, marks, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_command(action: Callable[[], str], out: Path) -> int:
    """Print what `action` returns and give 0; for a refusal print its one line on stderr and give `EXIT_CODE`."""
    try:
        text = action()
    except OSError as error:
        print(f"error: {error.filename or out}: cannot be written ({error.strerror})", file=sys.stderr)
        return EXIT_CODE
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    print(text)
    return 0


def read_json(path: Path) -> Any:
    """The JSON document in a file. Raises ValueError, one line naming the file, when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


def _read_info(path: Path) -> SessionInfo:
    document = read_json(path)
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(document).__name__}")
    known = {f.name: document[f.name] for f in fields(SessionInfo) if document.get(f.name) is not None}
    return SessionInfo(**known)


def read_rows(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """A Parquet file that has these columns. Raises ValueError, one line naming the file."""
    try:
        rows = pd.read_parquet(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error
    require(path, rows.columns, columns)
    for column in BOOLEANS.intersection(rows.columns):
        if len(rows) and rows[column].dtype != bool:
            raise ValueError(f"{path}: column {column} must be boolean without gaps, found {rows[column].dtype}")
    return rows


def _check_runs(path: Path, runs: pd.DataFrame, info: SessionInfo) -> None:
    sessions = sorted(set(runs["session"]) | ({info.session} if info.session else set()), key=str)
    if len(sessions) > 1:
        raise ValueError(
            f"{path}: mixed sessions ({', '.join(map(str, sessions))}); ratios across sessions are refused"
        )
    for column in ("tier", "condition"):
        values = sorted(set(runs[column].dropna()), key=str)
        if len(values) > 1:
            raise ValueError(f"{path}: mixed {column}s ({', '.join(map(str, values))}) in one session")
    strange = sorted(set(runs["role"]) - set(ROLES), key=str)
    if strange:
        raise ValueError(f"{path}: role {strange[0]!r} is not one of {', '.join(ROLES)}")
    for key in (["run_id"], ["role", "arm", "k", "round"]):
        twice = runs[runs.duplicated(key)]
        if not twice.empty:
            what = ", ".join(f"{column} {twice.iloc[0][column]}" for column in key)
            raise ValueError(f"{path}: two runs with the same {what}")


def _with_step_means(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    timed = steps[steps["timed"]].groupby("run_id")
    means = timed[STEP_MEANS].mean().add_suffix("_per_step")
    # Where only some loads were probed, the cold share is that of the probed ones.
    seen_bytes = timed["probed_bytes" if "probed_bytes" in steps.columns else "asked_bytes"].sum()
    means["cold_share"] = timed["cold_bytes"].sum() / seen_bytes.where(seen_bytes > 0)
    joined = runs.join(means, on="run_id")
    joined["timed_steps_found"] = runs["run_id"].map(timed.size()).fillna(0).astype(int)
    # A drop seen by either counter counts: the larger of the run's own and the sum over all its steps.
    seen = runs["run_id"].map(steps.groupby("run_id")["dropped"].sum()).fillna(0)
    joined["dropped"] = pd.concat([runs["dropped"], seen], axis=1).max(axis=1).astype(int)
    joined["void_reason"] = joined["void_reason"].fillna("")
    return joined


def _reason(runs: pd.DataFrame) -> str:
    arms = runs[runs["role"] == "arm"]
    return str(arms.iloc[0]["void_reason"]) if len(arms) else "the file holds none"
