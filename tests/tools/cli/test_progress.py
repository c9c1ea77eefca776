"""Long commands off a terminal: a line when a part begins, and about one a minute; on a terminal, bars."""

from io import StringIO

from rich.console import Console

from tools.terminal.progress import Bars


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def lines_of(output: StringIO) -> list[str]:
    return output.getvalue().splitlines()


def test_where_no_bar_is_drawn_each_part_is_named_when_it_begins_and_then_once_a_minute():
    output, clock = StringIO(), Clock()
    with Bars(console=Console(file=output), get_time=clock) as bars:
        first = bars.add_task("training [a]", total=1.0)
        assert lines_of(output) == ["training [a]"]
        second = bars.add_task("boards", total=20)
        for second_s in range(1, 151):
            clock.now_s = float(second_s)
            bars.update(first, completed=min(second_s / 100, 1.0))
            bars.advance(second, 0.125)
    assert lines_of(output) == [
        "training [a]",
        "boards",
        "after 1 min: training [a] 60 %, boards 37 %",
        "after 2 min: boards 74 %",
    ]


def test_on_a_terminal_bars_are_drawn_and_no_lines():
    output, clock = StringIO(), Clock()
    with Bars(console=Console(file=output, force_terminal=True, force_interactive=True), get_time=clock) as bars:
        task = bars.add_task("training", total=1.0)
        clock.now_s = 61.0
        bars.update(task, completed=0.5)
    assert "50%" in output.getvalue()
    assert "after 1 min" not in output.getvalue()
