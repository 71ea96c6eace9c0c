"""What a person sees on terminals of any width."""

import io

import pytest
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from flows.showing import print_whole

FIGURES = [f"0.{n}51 / 0.{n}57" for n in range(1, 9)]


def printed(*, no_wrap: bool, width: int) -> str:
    """Print a line of text and a table of figures as a terminal of a width shows them."""
    table = Table()
    for _ in FIGURES:
        table.add_column("click AUC / NE", no_wrap=no_wrap)
    table.add_row(*FIGURES)
    out = io.StringIO()
    print_whole(Group(Text("word " * 40), Group(table)), Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int) -> None:
    text = printed(no_wrap=True, width=width)

    assert "…" not in text
    assert all(figure in text for figure in FIGURES)
    assert text.count("click AUC / NE") == len(FIGURES)


def test_only_a_table_of_figures_is_wider_than_the_terminal() -> None:
    lines = printed(no_wrap=False, width=80).splitlines() + printed(no_wrap=True, width=80).splitlines()[:3]

    assert max(map(len, lines)) <= 80
