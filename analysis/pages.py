"""Finished tables as pages for the report: `python -m analysis.pages RESULTS --captions DIR --out DIR`.

Each table.md under one machine's results becomes `OUT/TIER/TARGET/TARGET.html`, figures embedded, so that the report
shows it as a person would read it; its figures and CSV files are copied beside it. Knows nothing of Snakemake, which
puts them all into one file, nor of what a table means.
"""

from __future__ import annotations

import argparse
import base64
import html
import shutil
import sys
from pathlib import Path

from markdown_it import MarkdownIt

from analysis.rows import run_command
from analysis.tables import NO_TIER, Table, find_tables

MIME = {".svg": "image/svg+xml", ".png": "image/png"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #1a1a1a; background: #fff; max-width: 78rem; }
table { border-collapse: collapse; margin: 0.8rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #c8c8c8; padding: 0.25rem 0.55rem; vertical-align: top; }
th { background: #f0f0f0; text-align: left; }
td { font-variant-numeric: tabular-nums; }
tr:nth-child(even) td { background: #fafafa; }
code { background: #f3f3f3; padding: 0 0.2rem; }
img { max-width: 100%; }
.caption { border-left: 4px solid #0072b2; padding-left: 0.8rem; color: #333; }
"""


def page(table: Table, caption: str = "") -> str:
    """The whole HTML of one table: caption, figures, text. HTML inside the text is shown, never run."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    figures = "".join(_figure(path) for path in table.figures)
    note = f'<p class="caption">{html.escape(caption)}</p>' if caption else ""
    title = html.escape(f"{table.title} ({table.tier or 'whole machine'})")
    body = markdown.render(table.text)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{note}\n{body}\n{figures}\n</body></html>\n"
    )


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    name = html.escape(path.stem)
    return f'<p><img alt="figure {name}" src="data:{MIME[path.suffix]};base64,{data}"></p>\n'


def caption_of(target: str, folder: Path) -> str:
    """A target's caption as one paragraph of text, "" where it has none."""
    path = folder / f"{target}.rst"
    return " ".join(path.read_text(encoding="utf-8").replace("``", "").split()) if path.is_file() else ""


def write(results: Path, captions: Path, out: Path) -> str:
    """Write a page for every table with its files, in place of what was there. Raises ValueError when there is none."""
    tables = find_tables(results)
    if not tables:
        raise ValueError(f"{results}: no table.md below it; run a target first, such as `snakemake tab3`")
    shutil.rmtree(out, ignore_errors=True)
    lines = []
    for table in tables:
        folder = out / (table.tier or NO_TIER) / table.target
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{table.target}.html"
        path.write_text(page(table, caption_of(table.target, captions)), encoding="utf-8")
        for part in (*table.figures, *sorted(table.path.parent.glob("*.csv"))):
            shutil.copyfile(part, folder / part.name)
        lines.append(f"{path} from {table.path}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.pages", description="Finished tables as HTML pages.")
    parser.add_argument("results", type=Path, metavar="RESULTS", help="one machine's results, results/MACHINE")
    parser.add_argument("--captions", type=Path, required=True, help="folder of TARGET.rst")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    return run_command(lambda: write(options.results, options.captions, options.out), options.out)


if __name__ == "__main__":
    sys.exit(main())
