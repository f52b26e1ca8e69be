"""Finished tables as HTML pages and as the machine's README: what is there, in order, nothing else, nothing run."""

from pathlib import Path

import pytest

from analysis import pages, results_readme
from analysis.tables import find_tables

TABLE = """# {title}

- machine: box (a CPU)
- tier: {tier}
- session: s1, commit abc, made 2026-01-02

| arm | tok/s |
| --- | ---: |
| a | 1.0 |
| b | 2.0 |

## Other

| x |
| --- |
| <script>alert(1)</script> |
"""


@pytest.fixture
def results(tmp_path) -> Path:
    root = tmp_path / "box"
    for folder, title in (("mini-35b/tab3", "Table 3"), ("mini-8b/tab3", "Table 3"), ("mini-35b/tab1", "Table 1")):
        (root / folder).mkdir(parents=True)
        (root / folder / "table.md").write_text(TABLE.format(title=title, tier=folder.split("/")[0]))
    (root / "mini-35b" / "tab3" / "tab3.png").write_bytes(b"png")
    (root / "mini-35b" / "tab3" / "tab3.svg").write_text("<svg/>")
    for name in ("pairs", "summary"):
        (root / "mini-35b" / "tab3" / f"{name}.csv").write_text(f"of {name}\n")
    (root / "mini-8b" / "tab3" / "tab3.png").write_bytes(b"png")
    (root / "bench").mkdir()
    (root / "bench" / "table.md").write_text("| measure |\n| --- |\n" + "".join(f"| m{n} |\n" for n in range(25)))
    (root / "mini-35b" / "tab4" / "sessions").mkdir(parents=True)  # measured, no table yet
    return root


def test_tables_come_in_the_papers_order_with_what_they_say(results):
    tables = find_tables(results)
    found = [(table.tier, table.target) for table in tables]
    assert found == [("mini-35b", "tab1"), ("mini-35b", "tab3"), ("mini-8b", "tab3"), ("", "bench")]
    assert tables[0].title == "Table 1" and tables[-1].title == "Bench"
    assert tables[1].fact("session") == "s1, commit abc, made 2026-01-02" and tables[1].fact("drift") == ""
    assert tables[1].first_table == ["| arm | tok/s |", "| --- | ---: |", "| a | 1.0 |", "| b | 2.0 |"]
    assert [path.name for path in tables[1].figures] == ["tab3.svg"]
    assert [path.name for path in tables[2].figures] == ["tab3.png"]


def test_a_page_shows_the_table_with_caption_and_figure_and_runs_nothing(results, tmp_path, capsys):
    captions, out = tmp_path / "captions", tmp_path / "pages"
    captions.mkdir()
    (captions / "tab3.rst").write_text("What ``tab3``\nshows & says.\n")
    (out / "old").mkdir(parents=True)
    (out / "old" / "gone.html").write_text("of another time")
    assert pages.main([str(results), "--captions", str(captions), "--out", str(out)]) == 0
    assert str(out / "mini-8b/tab3/tab3.html") in capsys.readouterr().out
    written = sorted(path.relative_to(out).as_posix() for path in out.glob("*/*/*"))
    assert written == [
        "machine/bench/bench.html",
        "mini-35b/tab1/tab1.html",
        "mini-35b/tab3/pairs.csv",
        "mini-35b/tab3/summary.csv",
        "mini-35b/tab3/tab3.html",
        "mini-35b/tab3/tab3.svg",
        "mini-8b/tab3/tab3.html",
        "mini-8b/tab3/tab3.png",
    ]
    assert (out / "mini-35b/tab3/pairs.csv").read_text() == "of pairs\n"
    text = (out / "mini-35b/tab3/tab3.html").read_text()
    assert "<h1>Table 3</h1>" in text and '<td style="text-align:right">1.0</td>' in text
    assert "What tab3 shows &amp; says." in text and "data:image/svg+xml;base64," in text
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "http://" not in text and "https://" not in text
    assert "data:image/png;base64," in (out / "mini-8b/tab3/tab3.html").read_text()
    assert 'class="caption"' not in (out / "machine/bench/bench.html").read_text()


def test_the_readme_links_every_table_and_shows_its_first_one(results, capsys):
    assert results_readme.main([str(results)]) == 0
    text = (results / "README.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert text.startswith("# Results of box\n\nMachine: box (a CPU)\n")
    assert "- [Table 3](mini-8b/tab3/table.md), mini-8b" in text
    assert "## Table 3, mini-35b\n\n- tier: mini-35b\n- session: s1, commit abc, made 2026-01-02\n\n| arm |" in text
    assert "[whole table](mini-35b/tab3/table.md), [figure tab3](mini-35b/tab3/tab3.svg)" in text
    assert "| m19 |" in text and "| m20 |" not in text and "5 more rows in the whole table" in text
    assert "script" not in text  # second tables stay where they are


def test_without_any_table_both_say_what_to_run(tmp_path, capsys):
    (tmp_path / "box").mkdir()
    assert results_readme.main([str(tmp_path / "box")]) == 2
    assert pages.main([str(tmp_path / "box"), "--captions", str(tmp_path), "--out", str(tmp_path / "pages")]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert "no table.md below it; run a target first" in line
    assert not (tmp_path / "pages").exists() and list((tmp_path / "box").iterdir()) == []


def test_a_table_that_cannot_be_read_is_named(results, capsys):
    (results / "bench" / "table.md").write_bytes(b"\xff\xfe")
    assert results_readme.main([str(results)]) == 2
    assert str(results / "bench" / "table.md") in capsys.readouterr().err


def test_comparisons_with_this_machine_in_them_are_shown_with_their_names(results, tmp_path):
    for name in ("box+m2-16gb", "other+m2-16gb"):
        (tmp_path / "compare" / name).mkdir(parents=True)
        (tmp_path / "compare" / name / "table.md").write_text(
            TABLE.format(title=f"Compared {name}", tier="in each line")
        )
    found = [(table.tier, table.target) for table in find_tables(results)]
    assert [place for place in found if place[1] == "compare"] == [("box+m2-16gb", "compare")]
    results_readme.main([str(results)])
    assert "[Compared box+m2-16gb](../compare/box+m2-16gb/table.md)" in (results / "README.md").read_text()
    assert pages.main([str(results), "--captions", str(tmp_path), "--out", str(tmp_path / "pages")]) == 0
    assert (tmp_path / "pages" / "box+m2-16gb/compare/compare.html").exists()


def test_what_takes_how_long_and_how_many_rows_reach_the_front_page(results):
    path = results / "mini-35b" / "tab1" / "table.md"
    facts = "- takes: seconds\n- n: 7 prompts\n- note: of another time\n- session"
    path.write_text(path.read_text().replace("- session", facts))
    results_readme.main([str(results)])
    text = (results / "README.md").read_text()
    assert all(fact in text for fact in ("- takes: seconds", "- n: 7 prompts", "- note: of another time"))


def test_a_table_of_given_rows_is_of_the_target_regress_and_named_by_its_rows(results):
    folder = results / "regress" / "here-mine"
    folder.mkdir(parents=True)
    (folder / "table.md").write_text(TABLE.format(title="Load cost", tier="mine"))
    assert ("here-mine", "regress") in [(table.tier, table.target) for table in find_tables(results)]
