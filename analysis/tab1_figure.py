"""The figure of Table 1: speed of decoding by arm on the left, of prompts cold and warm on the right, for each tier.

Knows nothing of the paper nor of files other than the two that it writes. Every round is a dot on its bar.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from analysis import style
from analysis.tab1_rows import TierRows

ARMS = ("ondemand", "prerouter", "ondemand-large", "prerouter-large")
CONDITIONS = ("cold", "warm")
# Colour and hatch of a bar: with the prerouter or not, and warm or not; a large bank is hatched.
LOOKS = {
    "ondemand": ("#B8D4E8", ""),
    "prerouter": ("#0072B2", ""),
    "ondemand-large": ("#B8D4E8", "////"),
    "prerouter-large": ("#0072B2", "////"),
    "cold": ("#FFFFFF", ""),
    "warm": ("#E69F00", ""),
}
GROUP_GAP = 0.8


def save_tab1_figure(tiers: Mapping[str, TierRows], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg. OSError passes."""
    with style.drawing("tab1"):
        style.save(draw_tab1(tiers), stem)


def draw_tab1(tiers: Mapping[str, TierRows]) -> Figure:
    """The figure itself."""
    about = ["bar: median; line: least to largest round; dot: a round"]
    for tier in tiers.values():
        tokens = int(tier.prefill["tokens"].iloc[0])
        about.append(
            f"{tier.tier} on {tier.session.info.machine or 'machine not named'}, K={tier.k}: condition "
            f"{tier.session.condition}, n = {len(tier.session.cell('ondemand', tier.k))} rounds, session "
            f"{tier.session.name}; prompts of {tokens} tokens, n = {len(tier.prefill_speeds('cold'))} cold and "
            f"{len(tier.prefill_speeds('warm'))} warm, session {tier.about['session']}"
        )
    caption = style.caption_lines(about, *(tier.session for tier in tiers.values()))
    height = 1.1 + 1.45 * len(tiers) + style.LINE_INCHES * len(caption)
    figure = Figure(figsize=(9.2, height))
    decode, prompts = figure.subplots(1, 2, width_ratios=(1.25, 1))
    bottom = (0.62 + style.LINE_INCHES * len(caption)) / height
    figure.subplots_adjust(left=0.17, right=0.985, top=1 - 0.34 / height, bottom=bottom, wspace=0.2)
    speeds = [[(arm, list(tier.session.cell(arm, tier.k)["tok_s"])) for arm in ARMS] for tier in tiers.values()]
    _bars(decode, [tier.tier for tier in tiers.values()], speeds, -0.38)
    prefills = [
        [(condition, list(tier.prefill_speeds(condition))) for condition in CONDITIONS] for tier in tiers.values()
    ]
    _bars(prompts, [""] * len(tiers), prefills, 0)
    for axes, title in ((decode, "Decoding"), (prompts, "Prompts, by page cache")):
        style.dress(axes, title)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("tokens per second")
    style.put_caption(figure, caption)
    return figure


def _bars(axes, tiers: list[str], groups: list[list[tuple[str, list[float]]]], label_at: float) -> None:
    place, places, names = 0.0, [], []
    most = max((value for group in groups for _, values in group for value in values), default=1)
    for tier, group in zip(tiers, groups, strict=True):
        middle = place + (len(group) - 1) / 2
        axes.text(label_at, middle, tier, transform=axes.get_yaxis_transform(), rotation=90, weight="bold", va="center")
        for name, values in group:
            style.rounds_bar(axes, place, values, *LOOKS[name], "no valid run")
            places.append(place)
            names.append(name)
            place += 1
        place += GROUP_GAP
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_xlim(0, 1.22 * most)
