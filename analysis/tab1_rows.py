"""What Table 1 is made of: a session and a set of prompts for each tier. Knows nothing of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.rows import Session, load_session, named, paired, read_json, read_rows
from analysis.statistics import Ratio, Spread, median_spread
from analysis.units import GIB

FAMILY_TAGS = {"qwen": "35b", "ling": "8b"}
PREFILL_COLUMNS = "role round condition tokens ttft_ms device_bytes".split()


@dataclass(frozen=True)
class TierRows:
    """What was measured of one tier: its session, and its prompts with what is known of them."""

    tag: str
    session: Session
    prefill: pd.DataFrame
    about: Mapping[str, Any]

    @property
    def tier(self) -> str:
        return str(self.session.all_runs["tier"].iloc[0])

    @property
    def k(self) -> int:
        return int(self.session.all_runs["k"].iloc[0])

    def speed(self, arm: str) -> Spread:
        return median_spread(self.session.cell(arm, self.k)["tok_s"])

    def prefill_speeds(self, condition: str) -> pd.Series:
        """tok/s of each prompt, by its round."""
        rows = self.prefill[(self.prefill["condition"] == condition) & (self.prefill["role"] == "arm")]
        rows = rows.set_index("round")
        return rows["tokens"] / (rows["ttft_ms"] / 1e3)

    def prefill_speed(self, condition: str) -> Spread:
        return median_spread(self.prefill_speeds(condition))

    @property
    def prefill_ratio(self) -> Ratio:
        """tok/s of warm over cold prompts, paired by round."""
        return paired(*(self.prefill_speeds(condition).to_frame("tok_s") for condition in ("warm", "cold")))

    @property
    def peak_gib(self) -> Spread:
        """Allocator peaks of the runs of the prerouter arm with the small bank."""
        return median_spread(self.session.cell("prerouter", self.k)["alloc_peak_bytes"] / GIB)


def load_tiers(sessions: Sequence[Path], prefills: Sequence[Path]) -> dict[str, TierRows]:
    """Each tier's rows by the tag of its model. Raises ValueError, one line: unreadable files, a tier that is there
    twice, whose session has several K, or that lacks its prompts."""
    prompts = {}
    for path in prefills:
        path = named(path, "prefill.json")
        about = read_json(path)
        missing = [key for key in ("family", "tier", "session") if key not in about]
        if missing:
            raise ValueError(f"{path}: does not say its {missing[0]}")
        prompts[about["family"]] = (about, read_rows(path.with_suffix(".parquet"), PREFILL_COLUMNS))
    tiers: dict[str, TierRows] = {}
    for path in sessions:
        session = load_session(path)
        tag = FAMILY_TAGS.get(session.info.family or "")
        if tag is None:
            raise ValueError(f"{path}: expected a session of {' or '.join(FAMILY_TAGS)}, found {session.info.family}")
        if tag in tiers:
            raise ValueError(f"{path}: a second session of {tag}; one tier of each model makes the table")
        ks = sorted(set(session.all_runs["k"]))
        if len(ks) > 1:
            raise ValueError(f"{path}: expected one K, found {', '.join(map(str, ks))}")
        if tag not in prompts:
            raise ValueError(f"{path}: no prompts of {tag} beside it")
        about, rows = prompts[tag]
        tiers[tag] = TierRows(tag, session, rows, about)
        if about["tier"] != tiers[tag].tier:
            raise ValueError(f"{path}: session of {tiers[tag].tier}, but prompts of {about['tier']}")
    return tiers
