"""The command's group: options before the command, lazy loading, and what becomes of errors."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import click

from neuron_store.cli.exits import INTERRUPTED, YES, exit_status
from neuron_store.cli.output import Output, give_up_stdout, log_to_stderr
from neuron_store.cli.session import Session
from neuron_store.errors import NeuronStoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "app", "run"]

_HERE = "neuron_store.cli"
COMMANDS = {
    "demo": (f"{_HERE}.demo:demo", "Show it all: twelve ranks on three nodes, two compiles."),
    "config": (f"{_HERE}.config:config", "Print every setting, its value and where it came from."),
    "doctor": (f"{_HERE}.doctor:doctor", "Measure every tier, and say whether it may be used."),
    "ls": (f"{_HERE}.looking:ls", "List the artifacts in each tier."),
    "show": (f"{_HERE}.looking:show", "Show an artifact's record, and what each tier answers."),
    "verify": (f"{_HERE}.scrubbing:verify", "Read every byte, check every digest, and repair."),
    "fetch": (f"{_HERE}.moving:fetch", "Bring artifacts from the shared tiers to this node."),
    "promote": (f"{_HERE}.moving:promote", "Publish local artifacts in the shared tiers."),
    "keygen": (f"{_HERE}.keygen:keygen", "Make a key pair to sign promotions with."),
    "why": (f"{_HERE}.explaining:why", "Tell what a missing artifact differs in from the rest."),
    "compile": (f"{_HERE}.compiling:compile_", "Get a graph's artifact, or those of many."),
    "prefetch": (f"{_HERE}.prefetch:prefetch", "Bring all graphs of manifests to this node."),
    "gc": (f"{_HERE}.collecting:gc", "Free space: leftovers, and old artifacts if you say so."),
    "manifest": (
        f"{_HERE}.manifest:manifest",
        "What engines compiled: show, compare, check, report.",
    ),
}
"""Command to where it is, imported when it is run, and its line in `--help`, in that order."""


class LazyGroup(click.Group):
    """Imports a command's module when it is asked for, and turns our errors into exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: click would import every command to ask it for its line.
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NeuronStoreError as error:
            session = ctx.find_object(Session)
            out = session.out if session is not None else Output()
            _tell(out, error)
            ctx.exit(exit_status(error))
        except KeyboardInterrupt:
            # Here, since click would print "Aborted!" and exit with 1.
            ctx.exit(INTERRUPTED)


def _tell(out: Output, error: NeuronStoreError) -> None:
    out.say(f"error: {error}")
    if out.json:
        out.document(ok=False, error={"type": type(error).__name__, "message": str(error)})


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--local",
    metavar="DIR",
    help="The local tier's root, instead of the one in the settings.",
)
@click.option(
    "--tier",
    "tiers",
    metavar="URL",
    multiple=True,
    help="A shared tier, instead of those in the settings: a path or a URL. Repeatable.",
)
@click.option("-v", "--verbose", count=True, help="Log to stderr what is done; -vv: everything.")
@click.version_option(package_name="neuron-store", message="%(prog)s %(version)s")
@click.pass_context
def app(context: click.Context, local: str | None, tiers: tuple[str, ...], verbose: int) -> None:
    """Compile each accelerator graph once: a store of compiled artifacts.

    Exit status: 0 yes, 1 an honest no (missing, corrupt, not fit), 2 usage or settings.
    """
    log_to_stderr(verbose)
    context.obj = Session(local=local, tiers=tiers)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    try:
        # Not standalone: click would take the KeyboardInterrupt for an ordinary failure.
        status = app.main(list(arguments), prog_name="neuron-store", standalone_mode=False)
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show(sys.stderr)
        return error.exit_code
    except OSError as error:
        # click's own printing, such as of `--help`.
        if _raised_in(error) == "click.utils":
            give_up_stdout(error)
        raise
    return status if isinstance(status, int) else YES


def _raised_in(error: BaseException) -> str:
    """The module whose frame raised the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__")) if trace is not None else ""
