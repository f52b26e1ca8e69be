"""Every finished table under one machine's results: where it lies, what it says of itself, which figures are beside it.

Knows nothing of what a table means: it reads the Markdown that each target writes (title, list of facts, tables).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The paper's order; a target that is not here comes after these.
ORDER = (
    "claims tab1 tab2 ladder merge tab3 tab4 fit fig3 regress predict memory resident appxb levers reuse math noise "
    "budgets compare bench engine"
).split()
COMPARE = "compare"  # folder beside those of the machines, of tables that set some of them beside each other
REGRESS = "regress"  # folder of the tables of given rows, one for each file of them
NO_TIER = "machine"  # the tier folder of tables that belong to the machine as a whole


@dataclass(frozen=True)
class Table:
    """One table.md: `tier` is "" for the machine as a whole, machines' ids of a comparison, a name of given rows."""

    path: Path
    tier: str
    target: str
    text: str

    @property
    def name(self) -> str:
        """The target's name as a title."""
        return self.target[:1].upper() + self.target[1:]

    @property
    def title(self) -> str:
        """The table's own title, the target's name where it has none."""
        titles = (line.removeprefix("# ") for line in self.text.splitlines() if line.startswith("# "))
        return next(titles, self.name)

    def fact(self, name: str) -> str:
        """What the list above the table says under this name, "" where it says nothing."""
        start = f"- {name}: "
        return next((line.removeprefix(start) for line in self.text.splitlines() if line.startswith(start)), "")

    @property
    def first_table(self) -> list[str]:
        """The lines of the first Markdown table."""
        lines: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("|"):
                lines.append(line)
            elif lines:
                break
        return lines

    @property
    def figures(self) -> list[Path]:
        """Figures beside the table, one file each: the SVG where there is one."""
        folder = self.path.parent
        return sorted([*folder.glob("*.svg"), *(p for p in folder.glob("*.png") if not p.with_suffix(".svg").exists())])


def find_tables(results: Path) -> list[Table]:
    """Every table one or two folders below a machine's results, and its comparisons with others beside them.

    In the paper's order. Raises ValueError, one line.
    """
    places = {path: ("", path.parts[-2]) for path in results.glob("*/table.md")}
    places |= {path: path.parts[-3:-1] for path in results.glob("*/*/table.md")}
    for path in results.glob(f"{REGRESS}/*/table.md"):  # of rows that somebody gave, not of a tier
        places[path] = (path.parts[-2], REGRESS)
    for path in results.parent.glob(f"{COMPARE}/*/table.md"):
        if results.name in path.parts[-2].split("+"):
            places[path] = (path.parts[-2], COMPARE)
    found = []
    for path, (tier, target) in places.items():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        found.append(Table(path, tier, target, text))
    return sorted(found, key=lambda table: (_rank(table.target), table.target, table.tier))


def _rank(target: str) -> int:
    return ORDER.index(target.lower()) if target.lower() in ORDER else len(ORDER)
