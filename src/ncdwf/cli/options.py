"""Arguments and options that several verbs take."""

from pathlib import Path
from typing import Annotated

import typer

from ncdwf.data.cifar import DATA_VARIABLE

SettingName = Annotated[
    str | None,
    typer.Argument(metavar="SETTING", help="digits-5-5 by default; `ncdwf list` shows them."),
]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL", help="A run or model directory.")]
OutDir = Annotated[
    Path | None, typer.Option("--out", "-o", help="Directory to write; a new one below runs/.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override any field, as discovery.optim.epochs=50; config.json of a run has them all, "
        "docs/method.md says what some do; repeatable.",
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help="Discovery method; ncdwf by default, or what the config.json of a setting says; "
        "`ncdwf list` shows them.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", "-s", help="Decides every random draw.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Replay the config.json of another run.")
]
ResumeDir = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Go on with a run that was cut off.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse all if one picture cannot be read.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data", envvar=DATA_VARIABLE, help="Where data sets lie, and are downloaded to."
    ),
]
