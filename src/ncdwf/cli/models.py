"""The verbs that use a saved model: naming pictures and classes, export, all that it holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ncdwf.cli.options import ModelDir, Strict
from ncdwf.cli.own import check_text, picture_shape
from ncdwf.cli.runs import check_learnt, go_on
from ncdwf.console import Bar, Format, err, out, print_holdings, print_rows, print_skipped
from ncdwf.data.folder import find_pictures
from ncdwf.data.gathering import decode
from ncdwf.errors import InputError, printable
from ncdwf.export import export_onnx
from ncdwf.learning.loop import choose_device
from ncdwf.model import Model
from ncdwf.results.run import Run, model_dir


def predict(
    model: ModelDir,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Picture files or folders.")],
    form: Annotated[Format, typer.Option("--format", "-f")] = Format.table,
    strict: Strict = False,
) -> None:
    """Name pictures: a known class or novel-1, novel-2, …; nobody says which kind they are.

    Pictures are turned upright, their shorter side is scaled and the middle is cut out.

    Examples:

        ncdwf predict runs/digits-5-5-ncdwf-seed0 photos/

        ncdwf predict runs/digits-5-5-ncdwf-seed0 a.png b.png --format csv
    """
    loaded = Model.load(_newest(model))
    files = find_pictures(paths)
    with Bar() as bar:
        decoded = decode(files, picture_shape(loaded), strict=strict, progress=bar)
    print_skipped(decoded.skipped)
    answers = loaded.to(choose_device("auto")).predict(decoded.images)
    columns = (answers.labels, answers.probability, answers.novelty)
    rows = [
        {
            "path": str(files[row]),
            "class": loaded.class_names[label],
            "probability": round(probability, 4),
            "head": "novel" if label >= loaded.num_known else "known",
            "novelty": round(novelty, 4),
        }
        for row, label, probability, novelty in zip(
            decoded.kept, *(column.tolist() for column in columns), strict=True
        )
    ]
    print_rows(rows, form)


def name(
    model: ModelDir,
    names: Annotated[list[str], typer.Argument(metavar="OLD=NEW…", help="As novel-1=kakapo.")],
) -> None:
    """Give classes other names.

    Example:

        ncdwf name both novel-1=kakapo novel-2="black robin"
    """
    directory = _newest(model)
    loaded = Model.load(directory)
    pairs: dict[str, str] = {}
    for text in names:
        old, new = _old_and_new(text, loaded.class_names)
        if old in pairs:
            raise InputError(f"{old!r} would be called {pairs[old]!r} and {new!r}; give one name")
        pairs[old] = new
    check_text(*pairs.values())
    loaded.rename(pairs)
    loaded.save_names(directory)
    names_now = ", ".join(map(printable, loaded.class_names))
    out.print(f"The classes of {model}: {names_now}", soft_wrap=True, highlight=False)


def export(
    model: ModelDir,
    onnx: Annotated[Path, typer.Option("--onnx", help="File to write.")],
) -> None:
    """Write a model as one ONNX graph: pictures in, class probabilities and P(novel) out.

    Example:

        ncdwf export both --onnx birds.onnx
    """
    export_onnx(Model.load(_newest(model)), onnx)
    out.print(f"Written to {onnx}, and it answers as the model does", soft_wrap=True)


def inspect(model: ModelDir) -> None:
    """List everything that a saved model holds, and what each part is derived from.

    A single number, such as the threshold on P(novel), is shown as it is.

    Example:

        ncdwf inspect runs/digits-5-5-ncdwf-seed0
    """
    loaded = Model.load(_newest(model))
    holdings = loaded.holdings()
    facts = {
        "backbone": loaded.architecture.backbone,
        "input": "×".join(map(str, loaded.architecture.input_shape)),
        "classes": f"{loaded.num_known} known, {loaded.num_novel} novel",
    }
    print_holdings(str(model), facts, holdings)
    total = sum(item.num_bytes for item in holdings)
    out.print(f"Together {total:,} bytes. Beside them: the model's shape and the class names")
    names = ", ".join(map(printable, loaded.class_names))
    out.print(f"{names}.", soft_wrap=True, highlight=False)
    out.print(
        "No picture, no vector, label or file name of a single picture is stored. The discovery "
        "phase receives the pool alone. Weights and "
        "class statistics can still tell, to a degree, whether a given picture was among the "
        "labelled ones; richer statistics (supervised.spread) tell more.",
        soft_wrap=True,
    )


def _old_and_new(text: str, class_names: Sequence[str]) -> tuple[str, str]:
    """Split OLD=NEW; either name may hold an equals sign, so OLD is one that a class has."""
    fitting = [old for old in class_names if text.startswith(f"{old}=") and text != f"{old}="]
    if len(fitting) > 1:
        raise InputError(
            f"{text!r} begins with the classes {' and '.join(map(repr, fitting))}; give one of "
            "them a name without '=' first"
        )
    old = fitting[0] if fitting else text.partition("=")[0]
    new = text[len(old) + 1 :]
    if not (old and new):
        raise InputError(f"{text!r} should be written OLD=NEW, as in novel-1=kakapo")
    return old, new


def _newest(model: Path) -> Path:
    """Return where the newest model of a run is; say so if discovery should have left a newer."""
    check_learnt(model)
    if Run(model).is_discovering:
        hint = (
            f"discovery in {model} has not finished; this is the model before it. "
            f"Go on with: {go_on('discover', model)}"
        )
        err.print(hint, highlight=False, soft_wrap=True)
    return model_dir(model)
