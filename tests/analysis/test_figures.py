"""The figure of Table 3: files of a sane size, the caption in the SVG, no text over another or off the page."""

import itertools
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from synthetic import make_session, void_run

from analysis.figures import STEP_PARTS, caption_lines, draw_tab3, save_tab3_figure
from analysis.rows import load_session, pair_ratios
from analysis.style import RC
from analysis.tab3 import summary


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


def labels_beyond_the_axis(figure) -> set[Text]:
    """Labels of ticks outside the axis limits: they exist, and are not drawn."""
    return {
        label
        for axes in figure.axes
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if tick > axes.get_xlim()[1]
    }


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"arms": ("ondemand", "prerouter"), "k_values": (8,), "rounds": 1},
        {"rounds": 5, "k_values": (2, 8)},
        {"arms": ("ondemand",), "k_values": (2,), "rounds": 2, "change": void_run("arm-ondemand-k2-r1", "swapped")},
    ],
)
def test_no_text_lies_over_another_or_off_the_page(tmp_path, shape):
    session = load_session(make_session(tmp_path / "s", **shape))
    with mpl.rc_context(RC):
        figure = draw_tab3(session, summary(session), pair_ratios(session))
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
