"""What the commands print: `rich` on a terminal, plain lines when piped, or one JSON document.

Results go to stdout, everything else to stderr. Text that comes from a tier or a record is not
trusted: control characters are shown, not sent, and nothing in it is markup.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from neuron_store.byte_sizes import human_bytes
from neuron_store.cli.exits import NO, PIPE_CLOSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["SCHEMA", "Bar", "Column", "Output", "give_up_stdout", "printable"]

SCHEMA = 1
"""Version of the JSON documents; fields may be added to a version, none changes or goes."""

# Cells to which a column may be folded on a narrow terminal.
_FOLDED = 7
_TO_SECONDS = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:\+00:00|Z)?(?=\Z)")
_STYLES = {
    **dict.fromkeys(
        ("ok", "hit", "created", "present", "fetched", "compiled", "fit", "removed", "trusted"),
        "green",
    ),
    **dict.fromkeys(
        ("missing", "miss", "may miss", "conflict", "repaired", "skipped", "waited"), "yellow"
    ),
    **dict.fromkeys(("kept", "would go", "slow", "warning"), "yellow"),
    **dict.fromkeys(("corrupt", "error", "failed", "FAILED", "refused"), "bold red"),
}


@attrs.frozen
class Column:
    """One column of a table."""

    name: str
    kind: str = "text"
    """`text`, `count`, `bytes`, `seconds`, `time` (ISO 8601, which people see to the second), or
    `outcome` (a word that has a colour)."""

    @property
    def numeric(self) -> bool:
        """Whether its values are numbers, which stand to the right."""
        return self.kind in {"count", "bytes", "seconds"}

    @property
    def whole(self) -> bool:
        """Whether people copy its values, which so stay on one line."""
        return self.kind == "time" or self.name in {"key", "path", "graph", "where", "check"}

    def plain(self, value: Any) -> str:
        """For programs: bytes as a number, `-` where there is no value."""
        if value is None or value == "":
            return "-"
        if self.kind == "seconds":
            return f"{value:.6f}"
        return printable(str(value)).replace("\n", " ")

    def human(self, value: Any) -> str:
        """For people."""
        if value is None:
            return ""
        if self.kind == "bytes":
            return human_bytes(value)
        if self.kind == "seconds":
            return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
        if self.kind == "time":
            text = _TO_SECONDS.sub(r"\1 \2", value)
            return printable(text if len(text) <= 40 else f"{text[:39]}…")
        return printable(str(value))


class Output:
    """Prints for one run of the command."""

    def __init__(self) -> None:
        self.json = False
        """Set by the option `--json` of each command."""
        self.command = ""
        """Which command runs, such as `manifest show`; set by that option, too."""

    @property
    def terminal(self) -> bool:
        """Whether people read the results as they come."""
        return not self.json and sys.stdout.isatty()

    @property
    def interactive(self) -> bool:
        """Whether people read the messages as they come."""
        return sys.stderr.isatty()

    # -- results --------------------------------------------------------------------------------

    def document(self, *, ok: bool, **fields: Any) -> None:
        """Print the JSON document. `ok` is true exactly when the exit status is 0."""
        content = {"command": self.command, "schema": SCHEMA, "ok": ok, **fields}
        self.write(json.dumps(content, indent=2, allow_nan=False) + "\n")

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Any]],
        *,
        title: str | None = None,
        aligned: bool = False,
    ) -> None:
        """Print a table: piped, one line a row, its fields separated by tabs, without a header.

        Args:
            columns: one for each field of a row.
            rows: values; None is none.
            title: shown on a terminal.
            aligned: piped, too, it is for people: a header, and columns padded with blanks.
        """
        if self.terminal:
            self._rich_table(columns, rows, title)
            return
        if not aligned:
            lines = [
                "\t".join(c.plain(v) for c, v in zip(columns, row, strict=True)) for row in rows
            ]
        else:
            cells = [[c.name for c in columns]]
            cells += [[c.human(v) for c, v in zip(columns, row, strict=True)] for row in rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = [
                "  ".join(
                    text.rjust(width) if column.numeric else text.ljust(width)
                    for text, width, column in zip(row, widths, columns, strict=True)
                ).rstrip()
                for row in cells
            ]
        self.write("".join(line + "\n" for line in lines))

    def _rich_table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[Any]], title: str | None
    ) -> None:
        from rich import box  # noqa: PLC0415  (only a terminal needs it, and it takes a while)
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        # As Text, like the cells: what a manifest says may look like markup.
        heading = None if title is None else Text(printable(title))
        table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(
                column.name,
                justify="right" if column.numeric else "left",
                overflow="fold",
                no_wrap=column.numeric or column.whole,
            )
        for row in rows:
            table.add_row(
                *(
                    Text(c.human(v), _STYLES.get(str(v), "") if c.kind == "outcome" else "")
                    for c, v in zip(columns, row, strict=True)
                )
            )
        console = Console()
        # Wider than the terminal where keys and paths demand it: the terminal's own wrapping can
        # be copied across, a fold of ours cannot.
        # Two cells of padding for each column, one of the box between them and at the edges.
        need = 1 + sum(3 + _least(c, [r[i] for r in rows]) for i, c in enumerate(columns))
        console.width = max(console.width, need)
        console.print(table)

    def write(self, text: str) -> None:
        """Print to stdout as it is. Leaves quietly when nobody reads it."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            give_up_stdout(error)

    # -- messages -------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line for people, on stderr."""
        try:
            sys.stderr.write(printable(text) + "\n")
        except OSError:  # nobody reads it, or it is full: there is no place left to tell that
            pass

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Bar]:
        """A bar on the terminal while `total` things are done; nothing when piped."""
        if not self.interactive or total == 0:
            yield Bar(what)
            return
        from rich.console import Console  # noqa: PLC0415  (only a terminal needs it)
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            Task,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.text import Text  # noqa: PLC0415

        class Left(ProgressColumn):
            """Counts down what the work itself says; rich's own guess knows no parallel work."""

            def render(self, task: Task) -> Text:
                end = task.fields["end"]
                return Text("" if end is None else time_left(end - time.monotonic()))

        shown = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Left(),
            console=Console(stderr=True),
            transient=True,
        )
        task = shown.add_task(what, total=total, end=None)

        def update(done: int, text: str, eta: float | None) -> None:
            end = None if eta is None else time.monotonic() + eta
            shown.update(task, completed=done, description=text, end=end)

        with shown:
            yield Bar(what, update)


class Bar:
    """Says how far the work has come. Safe from threads."""

    def __init__(
        self, what: str, update: Callable[[int, str, float | None], None] | None = None
    ) -> None:
        """Args: what is done; update, called with how many are done, what to show, seconds left."""
        self._what = what
        self._update = update
        self._begun = itertools.count()
        self._done = itertools.count(1)

    def begin(self, name: str) -> None:
        """One more thing begins, and so an earlier one is done."""
        self.at(next(self._begun), name)

    def end(self, name: str) -> None:
        """One more thing is done."""
        self.at(next(self._done), name)

    def at(self, done: int, text: str, eta: float | None = None) -> None:
        """So many are done; `eta` seconds are left, where that is known."""
        if self._update is not None:
            self._update(done, f"{self._what} {printable(text)}".strip(), eta)


class LogToStderr(logging.Handler):
    """Log lines as messages of the command; looks stderr up each time, as a bar may have it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = printable(self.format(record))
            sys.stderr.write(f"{record.levelname.lower()}: {text}\n")
        except Exception:  # noqa: BLE001  (as every handler: logging must not break the work)
            self.handleError(record)


def log_to_stderr(verbosity: int) -> None:
    """Show our warnings; with verbosity 1 what is done, from 2 everything."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    for name in ("neuron_store", "neuron_store_backends"):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not any(isinstance(handler, LogToStderr) for handler in logger.handlers):
            logger.addHandler(LogToStderr())


def _least(column: Column, values: Sequence[Any]) -> int:
    """Cells that a column takes at least; others than numbers and what is copied may fold."""
    widest = max([len(column.name), *(len(column.human(value)) for value in values)])
    return widest if column.numeric or column.whole else min(widest, _FOLDED)


def give_up_stdout(error: OSError) -> NoReturn:
    """End the command because stdout takes nothing more; quietly when nobody reads it.

    Raises:
        SystemExit: always.
    """
    # The interpreter flushes once more at exit, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        raise SystemExit(PIPE_CLOSED) from None
    Output().say(f"error: stdout cannot be written: {error.strerror or error}")
    raise SystemExit(NO) from None


def time_left(seconds: float) -> str:
    """Seconds to go, as a progress bar shows them."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"about {hours}:{minutes:02}:{rest:02} left"


def printable(text: str) -> str:
    """The text with every control character but newline and tab made visible."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
