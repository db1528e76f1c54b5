"""How commands print: tables and progress on a terminal, plain lines when piped, JSON on wish."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from neuron_store.abc import ArtifactStore
from neuron_store.manifest.report import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "bytes_text",
    "given_store",
    "print_json",
    "print_table",
    "progress",
    "ranks_text",
    "say",
    "shapes_text",
]


def given_store(ctx: click.Context) -> ArtifactStore | None:
    """The store that the caller of a command passed as its context's object, if it did."""
    return ctx.find_object(ArtifactStore)  # type: ignore[type-abstract]  # it is asked for by base


@contextmanager
def progress(what: str, total: int, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr, nothing elsewhere; yields what advances it by one."""
    if quiet or not sys.stderr.isatty():
        yield lambda _size=0: None
        return
    from rich.console import Console  # noqa: PLC0415  (for terminals only)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415  (as above)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    moved = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def step(size: int = 0) -> None:
            nonlocal moved
            moved += size
            told = f"{what} {bytes_text(moved)}" if moved else what
            bar.update(task, advance=1, description=told)

        yield step


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> None:
    if not sys.stdout.isatty():
        for row in rows:
            say("\t".join(row))
        return
    from rich.console import Console  # noqa: PLC0415  (for terminals only)
    from rich.table import Table  # noqa: PLC0415  (as above)
    from rich.text import Text  # noqa: PLC0415  (as above)

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        # As Text: a manifest's own text may look like rich's markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def say(text: str) -> None:
    click.echo(printable(text))


def printable(text: str) -> str:
    """Without control characters: text from a manifest must not drive the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in text)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def bytes_text(size: int | None) -> str:

    return "-" if size is None else human_bytes(size)


def shapes_text(shapes: Sequence[str], limit: int = 4) -> str:
    shown = " ".join(f"[{shape.removesuffix(',')}]" for shape in shapes[:limit])
    return shown + (f" and {len(shapes) - limit} more" if len(shapes) > limit else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3,7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "-"
