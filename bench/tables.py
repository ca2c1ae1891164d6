"""Tables of docs/numbers.md, and sections that a benchmark writes there by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/numbers.md"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table; a cell that is True or False tells whether a goal is met."""
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in rows:
        lines.append(
            _line(["NO" if each is False else "yes" if each is True else each for each in row])
        )
    return lines


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(each) for each in cells)} |"


def write_section(heading: str, text: str, behind: str, page: Path = PAGE) -> None:
    """The section of this heading, in its place; a new one stands behind the section `behind`."""
    if f"\n{heading}\n" not in page.read_text():
        before, found, rest = page.read_text().partition(f"\n{behind}")
        if not found:
            raise ValueError(f"{page} has no section '{behind}'")
        own, mark, rest = rest.partition("\n## ")
        page.write_text(f"{before}{found}{own}\n{heading}\n{mark}{rest}")
    before, _, rest = page.read_text().partition(f"\n{heading}\n")
    _, mark, rest = rest.partition("\n## ")
    page.write_text(f"{before}\n{heading}\n\n{text.strip()}\n{mark}{rest}")
