"""The command line: one verb, one short function."""

import io
import sys
from typing import Annotated

import typer

from ncdwf import __version__
from ncdwf.cli import benchmark, models, phases
from ncdwf.console import err, out
from ncdwf.errors import NcdwfError

UsageError: type[typer.BadParameter] = typer.BadParameter.__base__  # type: ignore[assignment]
"""What every wrong use of a verb is; Typer gives it no public name."""

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
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may hold any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (NcdwfError, UsageError) as error:
        message = error.format_message() if isinstance(error, UsageError) else str(error)
        err.print(f"ncdwf: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
        code = 2
    sys.exit(code or 0)
