"""Tests tables on terminals of any width: nothing that identifies a row is lost, and no line is too long."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rankless.cli.table import Column, Table

CELLS = st.text("abc123.", max_size=20)
NAMES = st.text("abc/._", min_size=1, max_size=50)


def lines_of(table: Table, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    out.print(table)
    written: str = out.file.getvalue()  # type: ignore[attr-defined]
    return written.splitlines()


@given(st.lists(st.tuples(NAMES, *[CELLS] * 6), min_size=1, max_size=5), st.integers(40, 200))
def test_lines_fit_and_have_all_cells(rows: list[tuple[str, ...]], width: int) -> None:
    columns = [Column("name", elastic="middle"), *(Column(f"c{n}", right=n % 2 == 0) for n in range(6))]
    lines = lines_of(Table(columns, rows), width)
    assert max(map(len, lines)) <= width
    cells = " ".join(lines).split()
    for name, *others in rows:
        assert set(others) - {""} <= set(cells)
        begin = name[: (min(3 * len(name) // 4, 32) - 1) // 2]
        assert any(cell.startswith(begin) for cell in cells)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_can_be_told_apart_on_narrow_terminals(width: int) -> None:
    names = [f"optimizer/model.layers.{n}.mlp.up_proj.weight/exp_avg" for n in range(3)]
    numbers = ["F32", "-0.1234567", "0.1234567", "-5.05e-05", "0.0721", "24.8"]
    columns = [Column("tensor", elastic="middle"), *(Column(title, right=True) for title in "abcdef")]
    lines = lines_of(Table(columns, [[name, *numbers] for name in names]), width)
    assert len({line.split()[0] for line in lines if line.startswith("optimizer")}) == (1 if width == 40 else 3)
    if width == 120:
        assert len(lines) == 4
    if width == 80:
        assert lines[2:4] == [names[0], "  F32  -0.1234567  0.1234567  -5.05e-05  0.0721  24.8"]


def test_a_table_of_short_names_stays_in_lines() -> None:
    lines = lines_of(Table([Column("module", elastic="middle"), Column("n", right=True)], [["a" * 16, "1" * 24]]), 40)
    assert lines[1] == "aaaaaa…aaaaaaa  " + "1" * 24


def test_a_table_of_elastic_columns_is_cut() -> None:
    columns = [Column("", elastic="middle"), Column("", elastic="end")]
    assert lines_of(Table(columns, [["name", "v" * 100]]), 40) == ["name  " + "v" * 33 + "…"]
