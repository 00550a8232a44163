"""The table of pitfalls is whole, and what it names exists."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBERS = [number for number in range(1, 222) if number % 3]
ROWS = [
    re.split(r"(?<!\\) \| ", line.strip("| \n"))
    for line in (ROOT / "tests" / "PITFALLS.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]


@lru_cache
def names(path: Path) -> set[str]:
    """What a file of Python or a template defines: functions, classes, values, macros; of a folder, all its files."""
    if path.is_dir():
        return set.union(*map(names, path.glob("*.py")))
    text = path.read_text()
    if path.suffix == ".jinja":
        return set(re.findall(r"^(?:\{% macro|def) (\w+)\(", text, re.MULTILINE))
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
    return found


def test_every_report_has_a_row() -> None:
    assert len(NUMBERS) == 148
    assert [int(row[0]) for row in ROWS] == NUMBERS
    assert {len(row) for row in ROWS} == {5}


def test_reports_are_linked() -> None:
    for number, reports, *_ in ROWS:
        links = re.findall(r"\[([^\]]+)\]\(([^)]*)\)", reports)
        assert links, number
        for text, url in links:
            assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url), (number, url)
            assert text.endswith(f"#{url.rpartition('/')[2]}"), (number, text)


def test_what_is_named_exists() -> None:
    for number, _, fault, answer, where in ROWS:
        assert fault
        assert answer in ("test", "construction", "out of scope"), number
        places = re.findall(r"`([\w./]+)::(\w+)`", where)
        assert places or answer == "out of scope", number
        for path, name in places:
            assert name in names(ROOT / path), f"{number}: {path} has no {name}"
        assert answer != "test" or any(path.startswith(("tests/", "generated/tests")) for path, _ in places), number


def test_few_are_out_of_scope() -> None:
    assert 0 < sum(row[3] == "out of scope" for row in ROWS) <= 30
