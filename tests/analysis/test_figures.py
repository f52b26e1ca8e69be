"""The figure of Table 3: files of a sane size, the caption in the SVG, no text over another or off the page."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from synthetic import ARMS, make_session, set_runs, tok_s, void_run
from synthetic_loads import make_loads

from analysis.figures import STEP_PARTS, caption_lines, draw_tab3, save_tab3_figure
from analysis.fit.figure import draw_fig3
from analysis.fit.lines import fits
from analysis.fit.paper_loads import PaperLoads
from analysis.fit.points import session_points
from analysis.loads import read_load_cost
from analysis.memory import summary as memory_summary
from analysis.memory_figure import draw_memory
from analysis.paper.claims import load_claims
from analysis.rows import load_session, pair_ratios
from analysis.style import RC
from analysis.tab3 import summary
from analysis.tab4 import summary as tab4_summary
from analysis.tab4_figure import draw_tab4

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
DRIFTED = set_runs("tok_s", 1.5 * tok_s("ondemand", 2, 0), role="drift")


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return load_session(make_session(tmp_path_factory.mktemp("session")))


def texts_of(svg) -> list[str]:
    return ["".join(node.itertext()) for node in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_files_and_caption(session, tmp_path):
    table = summary(session)
    save_tab3_figure(session, table, pair_ratios(session), tmp_path / "tab3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tab3.png", "tab3.svg"]
    height, width = imread(tmp_path / "tab3.png").shape[:2]
    assert 1500 < width < 2500 and 700 < height < 1600
    found = texts_of(tmp_path / "tab3.svg")
    caption = "testbox · mini-35b · condition budget:0.25 · n = 3 rounds · session s1"
    assert caption in found
    assert {"ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap", "K = 2", "K = 4", "K = 8"} <= set(found)


def test_a_drawing_is_the_same_twice(session, tmp_path):
    table, ratios = summary(session), pair_ratios(session)
    for name in ("first", "second"):
        save_tab3_figure(session, table, ratios, tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_a_long_caption_is_wrapped(tmp_path):
    def long_machine(frames, info):
        info["machine"] = "a machine with a very long name " * 6

    session = load_session(make_session(tmp_path / "s", change=long_machine))
    lines = caption_lines(session, summary(session))
    assert len(lines) > 1 and all(len(line) <= 118 for line in lines)
    assert any("n = 3 rounds" in line for line in lines)  # never broken


def labels_beyond_the_axis(figure) -> set[Text]:
    """Labels of ticks outside the axis limits: they exist, and are not drawn."""
    return {
        label
        for axes in figure.axes
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if not axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    }


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"arms": ("ondemand", "prerouter"), "k_values": (8,), "rounds": 1},
        {"rounds": 5, "k_values": (2, 8)},
        {"change": DRIFTED},
        {"arms": ("ondemand",), "k_values": (2,), "rounds": 2, "change": void_run("arm-ondemand-k2-r1", "swapped")},
    ],
)
def test_no_text_lies_over_another_or_off_the_page(tmp_path, shape):
    session = load_session(make_session(tmp_path / "s", **shape))
    with mpl.rc_context(RC):
        assert_legible(draw_tab3(session, summary(session), pair_ratios(session)))


def near_one_another(frames, info):
    """Cold shares that hardly differ and waits per load that hardly do: markers that touch one another."""
    runs = frames["runs"].set_index("run_id")
    arms, ks = (frames["steps"]["run_id"].map(runs[column]) for column in ("arm", "k"))
    frames["steps"]["wait_ms"] = frames["steps"]["loads"] * (1.5 + 0.3 * arms.map(ARMS.index) + 0.01 * ks)
    share = 0.6 + frames["loads"]["run_id"].map(runs["k"]) / 100
    frames["loads"]["cold_bytes"] = (share * frames["loads"]["asked_bytes"]).astype(int)


@pytest.mark.parametrize("change", [None, near_one_another])
def test_numbers_of_figure_3_lie_beside_one_another(tmp_path, change):
    points = session_points(load_session(make_session(tmp_path / "s", change=change)))
    loads = read_load_cost(make_loads(tmp_path / "loads"))
    with mpl.rc_context(RC):
        figure = draw_fig3(loads, fits(loads), points, PaperLoads.of(load_claims(CLAIMS)))
        assert_legible(figure)
    assert len(figure.axes[1].texts) == 6 + 12  # the paper's points, and ours of four arms


def test_every_figure_of_a_session_that_drifted_says_so(tmp_path):
    session = load_session(make_session(tmp_path / "s", change=DRIFTED))
    figures = (
        draw_tab3(session, summary(session), pair_ratios(session)),
        draw_tab4(session, tab4_summary(session)),
        draw_memory(session, memory_summary(session)),
    )
    for figure in figures:
        assert "no verdict: drift 1.50x (session s1)" in [text.get_text() for text in figure.texts]
    assert "no verdict" in figures[0].axes[0].get_xlabel()


def assert_legible(figure) -> None:
    """No text of a figure lies over another or off the page."""
    with mpl.rc_context(RC):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        beyond = labels_beyond_the_axis(figure)
        boxes = [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip() and text not in beyond
        ]
    assert len(boxes) > 10
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other_box), f"{text!r} lies over {other!r}"


def test_colours_differ_in_grey():
    def lightness(color: str) -> float:
        red, green, blue = mpl.colors.to_rgb(color)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    values = sorted(lightness(color) for *_, color, _ in STEP_PARTS)
    assert all(upper - lower > 0.15 for lower, upper in itertools.pairwise(values))
