"""How far routes repeat, from one route trace: `python -m analysis.reuse TRACE --claims CLAIMS --out DIR`.

Three questions: which share of a layer's experts the next token repeats, how many different experts a run of tokens
touches, and how often a bank of a given size would have held the expert that was asked for. Writes summary.csv,
compare.csv, table.md and the figure, all or none, and prints table.md. Counts only: knows nothing of bytes or time.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.lru import lru_hits, opt_hits
from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, absolute, compare_rows
from analysis.reuse_figure import save_figure
from analysis.rows import markdown_table, publishing, run_command, write_tables
from analysis.statistics import Difference, batch_mean
from analysis.traces import Trace, load_trace, stream
from analysis.units import interval

COMMAND = "snakemake reuse"
TIME_BUDGET = "about 2 minutes, most of it decoding the tokens that are recorded"
BANK_SIZES = 8
SUMMARY_COLUMNS = "part x series value".split()
HOW_TO_READ = (
    "A synthesised checkpoint has random routers, which hardly repeat experts from token to token: what it shows is "
    "chance, and how this experiment runs. Reuse that can be compared with the paper's needs trained weights. A trace "
    "with a stated reuse is made by `edge0 trace generate` and replayed by `trace` in the configuration.",
    "`by chance` is what K of E experts drawn blindly would give: K/E for neighbours, E(1-(1-K/E)^n) different experts "
    "after n tokens; for the bank, the same simulation of a blindly drawn trace of this shape.",
    "The 95% interval of the mean is that of consecutive batches of neighbours (20, or of 10 pairs each): neighbouring "
    "pairs share a token, and a text keeps its topic, so single pairs would make it too narrow.",
    "Different experts are counted over windows of n tokens side by side, then averaged over windows and layers.",
    "The bank starts empty and serves all layers in the order in which a step asks for them; first uses count as "
    "misses, so even a bank of every expert stays below 100%. The smallest holds one token's experts.",
    "`popular` keeps the experts that the whole trace uses most, whatever comes. `best possible` knows the future "
    "(Belady): no replacement rule that takes in each missed expert does better.",
)


def adjacent(trace: Trace) -> np.ndarray:
    """`[tokens - 1, layers]`: the share of a layer's set that the next token repeats. ValueError for one token."""
    if len(trace.routes) < 2:
        raise ValueError(f"trace {trace.name}: expected two tokens at the least, found one")
    hot = trace.chosen()
    return (hot[1:] & hot[:-1]).sum(axis=-1) / trace.k


def working_set(trace: Trace) -> pd.DataFrame:
    """Different experts of a layer in n tokens: columns tokens, experts, by_chance."""
    hot, rows = trace.chosen(), []
    counts = sorted({len(hot), *(2**power for power in range(len(hot).bit_length()))})
    for count in counts:
        windows = hot[: len(hot) // count * count].reshape(-1, count, *hot.shape[1:])
        touched = windows.any(axis=1).sum(axis=-1).mean()
        rows.append((count, touched, trace.experts * (1 - (1 - trace.chance) ** count)))
    return pd.DataFrame(rows, columns=["tokens", "experts", "by_chance"])


def hit_rates(trace: Trace) -> pd.DataFrame:
    """How often a bank holds what is asked: columns slots, share (of all experts), lru, popular, best, by_chance."""
    least = len(trace.layers) * trace.k
    sizes = sorted(set(np.geomspace(least, trace.total, BANK_SIZES).round().astype(int).tolist()))
    asked = stream(trace.routes, trace.experts)
    blind = np.argsort(np.random.default_rng(0).random((*trace.routes.shape[:2], trace.experts)), axis=-1)
    uses = np.sort(np.bincount(asked, minlength=trace.total))[::-1]
    again = np.cumsum(np.maximum(uses - 1, 0))
    return pd.DataFrame(
        {
            "slots": sizes,
            "share": np.array(sizes) / trace.total,
            "lru": lru_hits(asked, sizes) / len(asked),
            "popular": [again[size - 1] / len(asked) for size in sizes],
            "best": [opt_hits(asked, size) / len(asked) for size in sizes],
            "by_chance": lru_hits(stream(blind[..., : trace.k], trace.experts), sizes) / len(asked),
        }
    )


def mean_interval(repeated: np.ndarray) -> Difference:
    """Mean over tokens and layers with a 95% interval. Tokens are what varies, but pairs of neighbours share a token
    and a text its topic, so the interval is that of consecutive batches of pairs."""
    return batch_mean(repeated.mean(axis=1))


def _words(mean: Difference) -> str:
    if math.isnan(mean.ci_low):
        return f"{mean.mean:.3f} (no interval)"
    return f"{mean.mean:.3f} ({interval(mean.ci_low, mean.ci_high, '.3f')}, {mean.n} batches)"


def findings(trace: Trace, claims: Claims) -> list[Finding]:
    """The paper's claims of this experiment, ours beside them."""
    repeated = adjacent(trace)
    layers = repeated.mean(axis=0)
    each = interval(layers.min(), layers.max(), ".3f")
    ours = f"{_words(mean_interval(repeated))}, layers {each}, by chance {trace.chance:.3f}"
    place = f"{trace.source} on {trace.machine}"
    mine = [claim for claim in claims.by_id.values() if claim.experiment == "reuse"]
    here = {"machine": trace.machine, "tier": trace.source, "k": str(trace.k)}
    return [absolute(claim, ours, place, **here) for claim in mine if claim.id == "reuse.adjacent"]


def summary(trace: Trace, touched: pd.DataFrame, hits: pd.DataFrame) -> pd.DataFrame:
    """Every number of the figure, columns `SUMMARY_COLUMNS`; x is a layer, a number of tokens, or slots of the bank."""
    means = zip(trace.layers, adjacent(trace).mean(axis=0), strict=True)
    rows = [("adjacent", layer, "ours", value) for layer, value in means]
    rows += [("adjacent", layer, "by_chance", trace.chance) for layer in trace.layers]
    for part, x, frame in (("working_set", "tokens", touched), ("hit_rate", "slots", hits.drop(columns="share"))):
        melted = frame.melt(x, var_name="series")
        rows += [(part, *row) for row in melted[[x, "series", "value"]].itertuples(index=False)]
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def markdown(trace: Trace, touched: pd.DataFrame, hits: pd.DataFrame, claims: Claims) -> str:
    """The text of table.md."""
    layers, mean = adjacent(trace).mean(axis=0), mean_interval(adjacent(trace))
    about = ", ".join(f"{key} {trace.about[key]}" for key in sorted(trace.about) if key not in ("machine", "commit"))
    header = (
        f"machine: {trace.machine}",
        f"tier: {trace.source}, {len(trace.layers)} layers of {trace.experts} experts",
        "condition: none: routes do not depend on what is in memory",
        f"n: {len(trace.routes)} tokens, K={trace.k}",
        f"session: trace {trace.name}, commit {trace.about.get('commit', 'unknown')} ({about})",
        f"takes: {TIME_BUDGET}",
    )
    neighbours = [
        ("mean of all layers (95%)", _words(mean), f"{trace.chance:.3f}"),
        (f"least: layer {trace.layers[layers.argmin()]}", f"{layers.min():.3f}", ""),
        (f"most: layer {trace.layers[layers.argmax()]}", f"{layers.max():.3f}", ""),
    ]
    sets = [(str(row.tokens), f"{row.experts:.1f}", f"{row.by_chance:.1f}") for row in touched.itertuples()]
    banks = [
        (str(row.slots), *(f"{value:.1%}" for value in (row.share, row.lru, row.by_chance, row.popular, row.best)))
        for row in hits.itertuples()
    ]
    paper = [
        (finding.claim.id, str(finding.claim.value), finding.ours, str(finding.status))
        for finding in findings(trace, claims)
    ]
    bank_header = ("bank, slots", "of all experts", "LRU", "LRU by chance", "popular", "best possible")
    blocks = [
        f"# Reuse of experts from token to token, {trace.source}",
        "\n".join(f"- {line}" for line in header),
        "## Share of a layer's experts that the next token repeats",
        markdown_table(("", "ours", "by chance"), neighbours, right_from=1),
        "## Different experts of a layer",
        markdown_table(("tokens", "ours", "by chance"), sets, right_from=0),
        "## Asked experts that a bank would have held",
        markdown_table(bank_header, banks, right_from=0),
        "## The paper beside ours",
        markdown_table(("claim", "paper", "ours", "status"), paper),
        "## How to read",
        "\n".join(f"- {line}" for line in HOW_TO_READ),
    ]
    return "\n\n".join(blocks) + "\n"


def write(trace: Trace, claims: Claims, out: Path) -> str:
    """Write every output into `out`, all or none; returns the text of table.md. OSError passes."""
    touched, hits = working_set(trace), hit_rates(trace)
    text = markdown(trace, touched, hits, claims)
    with publishing(out) as scratch:
        compared = compare_rows(findings(trace, claims), claims, f"trace {trace.name}", COMMAND)
        write_tables(scratch, text, summary=summary(trace, touched, hits), compare=compared)
        caption = (
            trace.machine,
            trace.source,
            f"K = {trace.k} of {trace.experts} experts",
            "condition: none",
            f"n = {len(trace.routes)} tokens",
            f"session {trace.name}",
        )
        stated = claims.by_id.get("reuse.adjacent")
        paper = None if stated is None else float(stated.value)
        overlap = pd.Series(adjacent(trace).mean(axis=0), index=trace.layers)
        save_figure(overlap, trace.chance, paper, touched, hits, trace.experts, caption, scratch / "reuse")
    return text


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.reuse", description="How far routes repeat.")
    parser.add_argument("trace", type=Path, help="a file of `edge0 trace`")
    parser.add_argument("--claims", type=Path, required=True, help="the paper's claims.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, its CSV files and the figure")
    options = parser.parse_args(argv)
    return run_command(lambda: write(load_trace(options.trace), load_claims(options.claims), options.out), options.out)


if __name__ == "__main__":
    sys.exit(main())
