"""The paper against itself: `python -m analysis.paper.source_checks --claims results/paper/claims.yaml`.

Pure arithmetic on the claims, with every printed number taken as the range of what it may have been (`spans`).
A claim is called contradicted only when no rounding of any number in it repairs the arithmetic; what means of ratios or
a second-hand copy may repair, or what merely looks odd, is a note. Knows nothing of our own measurements.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

from analysis.paper.claims import Claims, load_claims
from analysis.paper.findings import Finding, Status
from analysis.paper.source_paper import ARMS, KS, Check, Outcome, Paper, consistent, judged
from analysis.paper.spans import Span
from analysis.rows import markdown_table, run_command
from analysis.units import GIB, MIB

GB = 10**9
# Three matrices of 2048 x 512 (35b) or 1536 x 512 (8b), 4 bits a weight, two 16-bit numbers for each 64 of them.
EXPERT_BYTES = 3 * 2048 * 512 * 9 // 16
EXPERT_BYTES_8B = 3 * 1536 * 512 * 9 // 16
HEAD_BYTES = 2 * (2560 * 512 + 512 * 256 + 2560 * 256)
KINDS = (
    "`arithmetic` must agree whatever the rounding, or a number cannot stand; `consistency` should agree, but means of "
    "ratios or a second-hand copy may repair it, so that a miss is a note; `beside` sets two quantities side by side."
)
COPY = "Table 3's rows reach us through one third-party copy"
ONE_EXPERT = "if a load brings one routed expert, once"
MEANS = "means of ratios are not ratios of means, and may repair it"


def loads_per_step(paper: Paper) -> list[Check]:
    layers = paper.count("arch.35b.layers")
    checks = []
    for k in KS:
        for arm in ARMS:
            loads, limit = paper.loads(k, arm), layers * k
            fits = loads.low <= limit
            what = f"{arm} at K={k}: MiB per step over MiB per load, against {layers} layers x {k} experts"
            words = "of at most" if fits else "but a step routes to no more than"
            found = f"{loads.text(1)} loads per step, {words} {limit} experts" + (
                "" if fits else f", {ONE_EXPERT}; {MEANS}"
            )
            checks.append(consistent(fits, (f"tab4.k{k}.{arm}", "arch.35b.layers"), what, found))
    printed = [paper.number("tab4.loads.k8", place) for place in range(len(ARMS))]
    most = layers * 8
    checks.append(
        judged(
            max(printed) <= most,
            ("tab4.loads.k8", "arch.35b.layers"),
            f"loads per step at K=8, against {layers} layers x 8 experts",
            f"{' and '.join(map(str, printed))} loads, where a step routes to at most {most} experts, {ONE_EXPERT}",
        )
    )
    derived = [paper.loads(8, arm).meets(Span.of(count)) for arm, count in zip(ARMS, printed, strict=True)]
    what = "the derived loads per step at K=8 are Table 4's quotients"
    return [*checks, judged(all(derived), ("tab4.loads.k8",), what, " and ".join(map(str, printed)))]


def load_is_an_expert(paper: Paper) -> list[Check]:
    rows = [f"tab4.k{k}.{arm}" for k in KS for arm in ARMS]
    whole = [paper.span(row, 0) / paper.span(row, 1) for row in rows]
    size = EXPERT_BYTES / MIB
    low, high = min(span.low for span in whole), max(span.high for span in whole)
    shared = Span(max(span.low for span in whole), min(span.high for span in whole))
    common = f", all six allow {shared.text(2)}" if shared.low <= shared.high else ""
    found = (
        f"{low:.2f} to {high:.2f} MiB for a load that is wholly cold{common}; an expert of this checkpoint is"
        f" {size:.4f} MiB: a load is nearly an expert, and not a third or a ninth of one"
    )
    return [Check(tuple(rows), "MiB per load over cold fraction, against the size of an expert", found)]


def blocked_within_step(paper: Paper) -> list[Check]:
    checks = []
    for k in KS:
        for arm in ARMS:
            blocked, step = paper.blocked_ms(k, arm), paper.step_ms(k, arm)
            fits = blocked.low <= step.high
            what = f"{arm} at K={k}: the wait for loads lies within the step (1000 over tok/s)"
            words = "of a step of" if fits else "is longer than the whole step of"
            source = "" if fits else f"; {COPY}, and {MEANS}"
            found = f"a wait of {blocked.text(2)} ms {words} {step.text(1)} ms{source}"
            checks.append(consistent(fits, (f"tab3.blocked.k{k}", f"tab3.k{k}"), what, found))
    return checks


def left_beside_waiting(paper: Paper) -> list[Check]:
    floor = paper.span("step.graph_floor")
    left = {k: paper.step_ms(k, "ondemand") - paper.blocked_ms(k, "ondemand") for k in KS}
    words = ", ".join(f"{span.text(0)} ms at K={k}" for k, span in left.items())
    claims = ("step.graph_floor", *(f"tab3.blocked.k{k}" for k in KS))
    found = f"step less wait leaves {words}, for building the graph ({floor.text(1)} ms) and all computing"
    return [Check(claims, "on demand, what waiting leaves of a step, against graph building", found)]


def work_added(paper: Paper) -> list[Check]:
    added = {}
    for k in KS:
        waited = paper.blocked_ms(k, "ondemand") - paper.blocked_ms(k, "prerouter")
        added[k] = waited - (paper.step_ms(k, "ondemand") - paper.step_ms(k, "prerouter"))
    words = ", ".join(f"{span.text(0)} ms at K={k}" for k, span in added.items())
    fill = paper.number("step.incremental_fill")
    claims = ("step.incremental_fill", *(f"tab3.blocked.k{k}" for k in KS))
    what = "wait that the prerouter saves, less step that it saves: work that it adds"
    return [Check(claims, what, f"{words}; the fill of {fill} ms at K=8 would be a part of it")]


def gains(paper: Paper) -> list[Check]:
    stated = Span(paper.span("tab3.gain", 0).low, paper.span("tab3.gain", 1).high)
    checks = []
    for row in (*(f"tab3.k{k}" for k in KS), "appxB.pipeline_k8"):
        gain = paper.span(row, 1) / paper.span(row, 0)
        what = f"prerouter over on-demand of {row}"
        if row.startswith("tab3"):
            checks.append(judged(gain.meets(stated), ("tab3.gain", row), what, f"{gain.text(2)}x"))
        else:  # the range is stated of Table 3 only
            checks.append(Check(("tab3.gain", row), what, f"{gain.text(2)}x beside Table 3's {stated.text(3)}x"))
    apart = paper.span("appxB.pipeline_k8", 0) / paper.span("tab3.k8", 0)
    found = f"{apart.text(1)}x, where sessions are said to differ by {paper.number('noise.cross_session')}x"
    what = "on-demand at K=8 in Appendix B over the same in Table 3"
    checks.append(Check(("appxB.pipeline_k8", "tab3.k8", "noise.cross_session"), what, found))
    roomy = paper.span("tab1.35b.decode") / paper.span("tab1.35b.decode_no_prerouter")
    found = f"{roomy.text(3)}x with 24 GB, {stated.text(3)}x with 16 GB"
    claims = ("tab3.shrinks_when_hot", "tab1.35b.decode", "tab3.gain")
    return [*checks, Check(claims, "the gain on the larger machine", found)]


def orders(paper: Paper) -> list[Check]:
    falls = all(
        paper.span(f"tab3.k{k}", place).high > paper.span(f"tab3.k{wider}", place).low
        for k, wider in itertools.pairwise(KS)
        for place in range(len(ARMS))
    )
    return [judged(falls, ("tab3.order_k",), "smaller K is faster in Table 3's rows", "yes" if falls else "no")]


def table2(paper: Paper) -> list[Check]:
    names = ("aime2026", "humaneval", "gpqa_diamond", "mmlu_pro", "ifbench")
    checks, largest = [], []
    for tier in ("35b", "8b"):
        gaps = {name: paper.span(f"tab2.{tier}.{name}", 1) - paper.span(f"tab2.{tier}.{name}", 0) for name in names}
        mean = sum(gaps.values(), Span(0, 0)) / len(gaps)
        claim = f"tab2.{tier}.gap"
        what, found = f"mean of the five gaps of {tier}", f"{mean.text(2)} points"
        checks.append(judged(mean.meets(paper.span(claim)), (claim,), what, found))
        largest.append(max(gaps, key=lambda name: gaps[name].low))
    found = f"{largest[0]} in 35b, {largest[1]} in 8b"
    reasoning = set(largest) == {"aime2026"}
    return [*checks, judged(reasoning, ("tab2.reasoning_gap",), "the benchmark with the largest gap", found)]


def resident(paper: Paper) -> list[Check]:
    ratio = paper.span("tab1.35b.decode") / paper.span("resident.decode")
    stated = round(paper.number("resident.ratio"))  # "five times" in words: no digit after the point to hold it to
    size = paper.span("arch.35b.disk") * (GB / GIB)
    return [
        judged(
            ratio.meets(Span.of(stated)),
            ("resident.ratio", "resident.decode", "tab1.35b.decode"),
            "tok/s of the engine over tok/s of the resident model",
            f"{ratio.text(2)}x: {stated} as a whole number",
        ),
        judged(
            size.meets(paper.span("resident.memory")),
            ("resident.memory", "arch.35b.disk"),
            "the base on disk in GiB",
            f"{size.text(2)} GiB",
        ),
    ]


def memory(paper: Paper) -> list[Check]:
    price = paper.span("mem.mlx.prerouter", 2) - paper.span("mem.mlx.ondemand", 2)
    beside = paper.span("mem.rss.prerouter", 2) - paper.span("mem.rss.ondemand", 2) - price
    held = paper.count("arch.35b.predicted_layers") * 8 * EXPERT_BYTES
    copies = [
        (paper.span("mem.mlx.prerouter", place + 1) - paper.span("mem.mlx.prerouter", place))
        / (paper.count("arch.35b.predicted_layers") * (wider - k) * EXPERT_BYTES / GIB)
        for place, (k, wider) in enumerate(itertools.pairwise(KS))
    ]
    return [
        judged(
            price.meets(paper.span("mem.price_k8", 0)),
            ("mem.price_k8", "mem.mlx.prerouter", "mem.mlx.ondemand"),
            "allocation with the prerouter less without, K=8",
            f"{price.text(2)} GiB",
        ),
        Check(
            ("mem.price_k8", "mem.rss.prerouter", "mem.rss.ondemand"),
            "change of peak RSS less change of allocation at K=8, beside the stated change of the page cache",
            f"{beside.text(2)} GiB beside {paper.number('mem.price_k8', 1)}: two counters, near each other",
        ),
        Check(
            ("mem.double_hold",),
            "8 experts of each predicted layer, beside the stated GiB that are held twice",
            f"{held / GIB:.2f} GiB beside {paper.number('mem.double_hold')}; in GB it is {held / GB:.2f}",
        ),
        Check(
            ("mem.mlx.prerouter", "mem.double_hold"),
            "growth of the allocation from K=2 to 4 and from 4 to 8, in copies of the added experts",
            f"{copies[0].text(1)} and {copies[1].text(1)}, where bundle and stack make 2",
        ),
        Check(
            ("tab1.8b.decode_lru1024",),
            "960 more bundles of 8b",
            f"{(1024 - 64) * EXPERT_BYTES_8B / GIB:.2f} GiB when all are filled, where about 0.9 is stated",
        ),
    ]


def table4_shape(paper: Paper) -> list[Check]:
    rows = {k: [[paper.span(f"tab4.k{k}.{arm}", place) for place in range(3)] for arm in ARMS] for k in KS}
    colder = all(on[place].high > off[place].low for off, on in rows.values() for place in (0, 1))
    fewer = all(paper.loads(k, "prerouter").low < paper.loads(k, "ondemand").high for k in KS)
    ratio = {k: on[2] / off[2] for k, (off, on) in rows.items()}
    near = all(abs(ratio[k] - 1).low < 0.05 for k in (2, 8)) and ratio[4].meets(Span(1.155, 1.165))
    words = ", ".join(f"{span.text(3)} at K={k}" for k, span in ratio.items())
    found = f"fewer, larger, colder: {'yes' if colder and fewer else 'no'}; bytes with over without: {words}"
    return [judged(colder and fewer and near, ("tab4.shape",), "Table 4's rows, arm by arm", found)]


def fit_points(paper: Paper) -> list[Check]:
    residuals = {}
    for k in KS:
        for arm in ARMS:
            line = paper.span("fit.intercept") + paper.span("fit.slope") * paper.span(f"tab4.k{k}.{arm}", 1)
            residuals[k, arm] = abs(paper.blocked_ms(k, arm) / paper.loads(k, arm) - line)
    line = f"{paper.number('fit.intercept')} + {paper.number('fit.slope')} x cold"
    checks = []
    for claim, arms in (("fit.residual_all", ARMS), ("fit.residual_prerouter", ("prerouter",))):
        kept = [span for (_, arm), span in residuals.items() if arm in arms]
        largest = Span(max(span.low for span in kept), max(span.high for span in kept))
        points = "all six points" if len(arms) > 1 else "the prerouter's points"
        what = f"largest residual of wait over loads from {line}, {points}"
        found = f"{largest.text(2)} ms: the printed fit is of Table 4's loads as they are"
        agrees = largest.meets(paper.span(claim))
        checks.append(consistent(agrees, (claim, "fit.intercept", "fit.slope"), what, found))
    return checks


def storage(paper: Paper) -> list[Check]:
    share = paper.span("step.disk_share").high
    rates = {
        (k, arm): paper.span(f"tab4.k{k}.{arm}", 2).low / (share * paper.step_ms(k, arm).high / 1000)
        for k in KS
        for arm in ARMS
    }
    (k, arm), rate = max(rates.items(), key=lambda item: item[1])
    found = f"at least {rate / 1024:.1f} GiB/s while it reads ({arm}, K={k})"
    what = "the storage speed that the stated share of reading implies"
    return [Check(("step.disk_share", f"tab4.k{k}.{arm}"), what, found)]


def architecture(paper: Paper) -> list[Check]:
    heads, predicted = paper.count("arch.35b.heads"), paper.count("arch.35b.predicted_layers")
    heads_8b, predicted_8b = paper.count("arch.8b.heads"), paper.count("arch.8b.predicted_layers")
    layers, experts = paper.count("arch.35b.layers"), paper.count("arch.35b.experts")
    adapters = (heads * HEAD_BYTES + paper.count("arch.35b.lora_disk") * 10**6) / GB
    rest = paper.span("arch.35b.disk") - layers * experts * EXPERT_BYTES / GB
    return [
        judged(
            (heads, predicted) == (38 - 6 + 1, 38 - 7 + 1),
            ("arch.35b.heads", "arch.35b.predicted_layers"),
            "owners 6 to 38, layers 7 to 38",
            f"{heads} heads for {predicted} layers: the last head predicts layer 39, which routes by itself",
        ),
        judged(
            (heads_8b, predicted_8b) == (22 - 7 + 1, 23 - 8 + 1),
            ("arch.8b.heads", "arch.8b.predicted_layers"),
            "owners 7 to 22, layers 8 to 23",
            f"{heads_8b} heads for {predicted_8b} layers",
        ),
        judged(
            2048 + 2 * experts == paper.count("arch.35b.head_input"),
            ("arch.35b.head_input", "arch.35b.experts"),
            "2048 + 2 x experts per layer",
            f"{2048 + 2 * experts}",
        ),
        judged(
            paper.span("arch.35b.adapters_disk").meets(adapters),
            ("arch.35b.adapters_disk", "arch.35b.lora_disk", "arch.35b.heads"),
            f"{heads} heads of 16-bit weights and the adapter",
            f"{adapters:.2f} GB",
        ),
        judged(
            rest.high > 0,
            ("arch.35b.disk", "arch.35b.layers", "arch.35b.experts"),
            "the base less its routed experts at 4.5 bits a weight",
            f"{rest.text(2)} GB for everything that stays in memory",
        ),
        judged(
            paper.count("staged.stack_tensors") == 3 * 3,
            ("staged.stack_tensors",),
            "3 projections x weight, scale, bias",
            f"{3 * 3}",
        ),
    ]


CHECKS: tuple[Callable[[Paper], list[Check]], ...] = (
    architecture,
    resident,
    table2,
    gains,
    orders,
    blocked_within_step,
    left_beside_waiting,
    work_added,
    loads_per_step,
    load_is_an_expert,
    table4_shape,
    fit_points,
    storage,
    memory,
)


def run_checks(claims: Claims) -> list[Check]:
    """Every check in the order of the paper. Raises ValueError when the file lacks a claim that a check is about."""
    paper = Paper(claims)
    try:
        return [check for function in CHECKS for check in function(paper)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"claims.yaml: a claim that the checks are about is missing or malformed ({error})") from error


def findings(claims: Claims) -> list[Finding]:
    """A finding for each claim that cannot stand, with what contradicts it."""
    return [
        Finding(claims.by_id[claim], Status.CONTRADICTED, "", f"{check.what}: {check.found}")
        for check in run_checks(claims)
        if check.outcome is Outcome.CONTRADICTED
        for claim in check.against
    ]


def notes(claims: Claims) -> dict[str, list[str]]:
    """Of each claim that a check speaks against without contradicting it, what the checks say."""
    found: dict[str, list[str]] = {}
    for check in run_checks(claims):
        if check.outcome is Outcome.NOTE:
            for claim in check.against:
                found.setdefault(claim, []).append(f"{check.what}: {check.found}")
    return found


def table(claims: Claims) -> str:
    """Every check as a Markdown table, contradictions first, and what kinds of checks there are."""
    order = (Outcome.CONTRADICTED, Outcome.NOTE, Outcome.AGREES)
    checks = sorted(run_checks(claims), key=lambda check: order.index(check.outcome))
    rows = [(str(check.outcome), str(check.kind), check.what, check.found, ", ".join(check.claims)) for check in checks]
    return f"{markdown_table(('outcome', 'kind', 'computed', 'comes out as', 'claims'), rows, right_from=5)}\n\n{KINDS}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.paper.source_checks", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--claims", type=Path, default=Path("results/paper/claims.yaml"))
    options = parser.parse_args(argv)
    return run_command(lambda: table(load_claims(options.claims)), options.claims)


if __name__ == "__main__":
    sys.exit(main())
