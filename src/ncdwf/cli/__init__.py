"""The command line: one verb, one short function."""

import io
import sys
from typing import Annotated

import typer

from ncdwf import __version__
from ncdwf.cli import benchmark, models, phases
from ncdwf.console import err, out
from ncdwf.errors import NcdwfError

app = typer.Typer(
    no_args_is_help=True,
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
        app()
    except NcdwfError as error:
        err.print(f"ncdwf: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
