"""How the work of a verb begins: from a recipe, a configuration, a model or a run cut off."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ncdwf.config import Config, override
from ncdwf.console import Bar
from ncdwf.data.setting import DATA_SETS, Setting
from ncdwf.errors import InputError
from ncdwf.learning.discovery import PHASE as DISCOVERY
from ncdwf.learning.discovery import check_method
from ncdwf.learning.supervised import PHASE as SUPERVISED
from ncdwf.model.archive import DESCRIPTION_FILE
from ncdwf.recipes import RECIPES, recipe
from ncdwf.results import experiment
from ncdwf.results.configuration import complete, read_config
from ncdwf.results.run import CONFIG_FILE, Run, load_supervised, new_run_dir


class Interrupted(Exception):
    """Somebody pressed Ctrl-C, and this is how to go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What the options of a command change in a recipe."""

    method: str | None = None
    seed: int | None = None
    sets: tuple[str, ...] = ()
    data_dir: Path | None = None

    def apply(self, config: Config) -> Config:
        """Return the changed configuration, complete, once it is clear that it can be run."""
        if self.method is not None and self.method != config.method["name"]:
            check_method(self.method)
            other = recipe(config.setting, self.method)
            config = replace(config, method=other.method, discovery=other.discovery)
        config = self.override(config)
        fetch(config.setting, self.data_dir)
        experiment.check(config, self.data_dir)
        return config

    def override(self, config: Config) -> Config:
        """Return the configuration with the seed and the single fields changed, complete."""
        if self.seed is not None:
            config = replace(config, seed=self.seed)
        config = complete(config)
        method = config.method["name"]
        for assignment in self.sets:
            field = assignment.partition("=")[0].partition(".")[0]
            if field in ("setting", "own"):
                raise InputError(
                    f"--set cannot choose {field}; the argument SETTING and --images name the data"
                )
        config = override(config, *self.sets)
        name = check_method(config.method["name"])
        if name != method:  # which has other fields, and a recipe of its own
            raise InputError(
                f"--set cannot choose the method; --method {name} of 'ncdwf run' and "
                "'ncdwf discover' does"
            )
        return complete(config)


def begin(
    setting: str | None,
    out_dir: Path | None,
    resume: Path | None,
    file: Path | None,
    changes: Changes,
) -> Run:
    """Begin a run of a setting, or go on with one."""
    if resume is not None:
        return _reopen(resume, changes, setting, out_dir, file)
    if file is not None and setting is not None:
        raise InputError("--config names the setting already; give one of the two")
    start = read_config(file) if file else _recipe(setting or "digits-5-5")
    if start.own is not None:
        raise InputError(f"{file} is of pictures of your own; 'ncdwf learn --images' takes them")
    config = changes.apply(start)
    return Run.create(run_dir(out_dir, config), config)


def reopen_round(resume: Path, changes: Changes, *others: object) -> Run:
    """Go on with a run whose pool is known."""
    work = _reopen(resume, changes, *others)
    check_learnt(resume)
    own = work.config.own
    if own is not None and not own.pool:
        place = shlex.quote(str(resume))
        raise InputError(
            f"{resume} has no pool yet; give one with: ncdwf discover {place} --images …"
        )
    return work


def begin_round(model: Path, setting: str | None, out_dir: Path | None, changes: Changes) -> Run:
    """Begin discovery in the pool of a setting, from what the model was before any."""
    check_learnt(model)
    start = load_supervised(model)
    recorded = recorded_config(model, setting, option="--images")
    if start.model.num_novel > 0 or ((model / DESCRIPTION_FILE).exists() and is_own(model)):
        raise InputError(
            f"{model} has discovered classes in pictures of your own, which a setting would begin "
            "without; --images begins another round"
        )
    config = changes.apply(recorded)
    check_over(config, recorded)
    if setting is not None:
        _check_labelled(model, setting)
        start.model.check(experiment.pool_of(config.setting, changes.data_dir)[:1])
    return Run.create(run_dir(out_dir, config), config, start)


def _check_labelled(model: Path, setting: str) -> None:
    """Refuse a model that learnt from other labelled pictures than those of `setting`.

    Its scores would be of pictures that it knows, or of other classes.
    """
    if (model / CONFIG_FILE).exists() and not is_own(model):
        learnt = Run.open(model).config.setting
        if Setting.parse(learnt).labelled_name != Setting.parse(setting).labelled_name:
            raise InputError(
                f"{model} learnt from the labelled pictures of {learnt}, and {setting} has others"
            )


def is_own(model: Path) -> bool:
    """Tell whether a run learnt from somebody's own pictures."""
    return (model / CONFIG_FILE).exists() and Run.open(model).config.own is not None


def recorded_config(model: Path, setting: str | None, *, option: str) -> Config:
    """Return the configuration of the run in `model`, turned to `setting` if one is named.

    A model without its run gets the recipe of `setting`. Where the run has no setting, `option`
    names other pictures.
    """
    if (model / CONFIG_FILE).exists():
        config = Run.open(model).config
        if setting is None:
            if config.own is not None:
                raise InputError(
                    f"{model} learnt from pictures of your own; {option} says which ones to take"
                )
            return config
        num_novel = len(Setting.parse(setting).novel_classes)
        discovery = replace(config.discovery, num_novel=num_novel)
        return replace(config, setting=setting, discovery=discovery, own=None)
    if setting is not None:
        return _recipe(setting)
    if not model.exists():
        raise InputError(f"{model} does not exist")
    raise InputError(f"{model} holds no {CONFIG_FILE}; name the setting with --setting")


def fetch(setting: str, data_dir: Path | None) -> None:
    """Download what a setting needs, unless it is there."""
    with Bar(unit="kB", size=1000) as bar:
        Setting.parse(setting).fetch(data_dir, bar)


def check_over(config: Config, recorded: Config) -> None:
    """Refuse changes of the supervised phase, which the model has behind it."""
    if (config.supervised, config.backbone) != (recorded.supervised, recorded.backbone):
        raise InputError("discover cannot change supervised or backbone: that phase is over")


FIELDS = {
    "seed": "seed",
    "method": "method.name",
    "backbone": "backbone",
    "pool": "discovery.pool",
    "num-novel": "discovery.num_novel",
}
"""The field that each option changes."""


def check_once(sets: Sequence[str], **options: object) -> None:
    """Refuse a field that an option of its own gives and --set as well."""
    keys = {assignment.partition("=")[0] for assignment in sets}
    given = {name.replace("_", "-") for name, value in options.items() if value is not None}
    for name in sorted(given):
        if FIELDS[name] in keys:
            raise InputError(f"--{name} and --set {FIELDS[name]}=… say the same; give one of them")


RUNS = Path("runs")
"""Where a run is written unless somebody says it."""
VERBS = {SUPERVISED: "learn", DISCOVERY: "discover"}
"""What does each phase."""


def check_free(out_dir: Path | None) -> None:
    """Refuse a directory with a run or a model before many pictures are read for nothing."""
    if out_dir is None:
        return
    with suppress(OSError):  # such a path is refused when it is written
        if phase := Run(out_dir).unfinished:
            raise InputError(
                f"{out_dir} holds a run that has not finished; choose another directory, or go on "
                f"with it: {go_on(VERBS[phase], out_dir)}"
            )
        if any((out_dir / name).exists() for name in (CONFIG_FILE, DESCRIPTION_FILE)):
            raise InputError(f"{out_dir} holds a run or a model already; choose another directory")


def check_apart(images: Path, out_dir: Path | None) -> None:
    """Refuse to write a run among labelled pictures, where its folder would be one more class."""
    target = out_dir or RUNS
    inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(images))
    if inside and images.is_dir():
        raise InputError(
            f"the run would be written to {target}, among the pictures of {images}; choose a "
            "directory elsewhere with --out"
        )


def check_learnt(model: Path) -> None:
    """Refuse a run that was cut off before it had any model."""
    with suppress(OSError):  # such a path is refused when it is read
        if Run(model).unfinished == SUPERVISED:
            raise InputError(
                f"the run in {model} has not finished and holds no model yet; go on with it: "
                f"{go_on('learn', model)}"
            )


def go_on(verb: str, path: Path) -> str:
    """Return the command that goes on with a run, to be pasted into a shell."""
    return f"ncdwf {verb} --resume {shlex.quote(str(path))}"


def run_dir(out_dir: Path | None, config: Config) -> Path:
    """Return the directory that was asked for, or a new one."""
    return out_dir or new_run_dir(RUNS, config)


def _reopen(resume: Path, changes: Changes, *others: object) -> Run:
    if any(other is not None for other in others) or changes != Changes(data_dir=changes.data_dir):
        raise InputError(
            "--resume goes on with the run's own configuration; give nothing beside it but --data"
        )
    return Run.open(resume)


def _recipe(setting: str) -> Config:
    data = Setting.parse(setting).data
    if data not in RECIPES:
        reason = DATA_SETS[data].missing or f"a recipe for {data} comes with a later release"
        raise InputError(f"setting {setting!r} cannot be run yet: {reason}")
    return recipe(setting)
