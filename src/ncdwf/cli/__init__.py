"""The command line: one verb, one short function."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ncdwf import __version__
from ncdwf.cli import benchmark, models, phases
from ncdwf.cli.runs import Interrupted
from ncdwf.console import err, out
from ncdwf.errors import InputError, NcdwfError, printable

UsageError: type[typer.BadParameter] = typer.BadParameter.__base__  # type: ignore[assignment]
"""What every wrong use of a verb is; Typer gives it no public name."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, Typer's as well."""

app = typer.Typer(
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Novel class discovery without forgetting.",
    epilog="Start with `ncdwf run`: both phases on the embedded digits, about a minute on a CPU.",
)

# The order of the verbs in the help.
for _verb in (
    *(phases.run, phases.learn, phases.discover, phases.evaluate),
    *(models.predict, models.name, models.export, models.inspect),
    benchmark.reproduce,
):
    app.command()(_verb)
app.command("list")(phases.list_all)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out.print(f"ncdwf {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; a problem that the user can mend is one line and exit code 2."""
    if sys.stdout is None:  # it was closed: nobody reads
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (it stays open)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may hold any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if "" in sys.argv[1:]:
            raise InputError("an argument is empty; is a variable of the shell not set?")
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == INTERRUPTED:
            _say("Interrupted.")
        sys.stdout.flush()
    except Interrupted as how:
        _say(f"Interrupted. {how}")
        code = INTERRUPTED
    except (NcdwfError, UsageError) as error:
        code = _refuse(error.format_message() if isinstance(error, UsageError) else str(error))
    except OSError as error:  # such as no room left where standard output goes
        code = _refuse(str(error))
        try:
            sys.stdout.flush()
        except OSError:  # what is left over is not tried again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code or 0)


def _refuse(message: str) -> int:
    """Say what is wrong on one line; return the exit code."""
    _say(f"ncdwf: {printable(message)}", style="red")
    return 2


def _say(line: str, style: str | None = None) -> None:
    with suppress(OSError):  # nobody may be reading any more
        err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
