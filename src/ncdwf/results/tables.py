"""Tables in Markdown, made of finished runs; the paper's numbers stand beside ours."""

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ncdwf.results import paper
from ncdwf.results.benchmark import Line, find
from ncdwf.results.evaluation import PAPER_TAUS
from ncdwf.results.grids import CIFAR_SETTINGS, COUNTED, GRIDS, MAIN, Grid, Variant

PARTS = ("known", "novel", "all")
TITLES = {"rs": "RS", "ncl": "NCL", "uno": "UNO", "ncdwf": "NCDwF"}
Protocol = Literal["agnostic", "strict"]
Tau = float | Literal["own"]


def runs_of(grid: Grid, setting: str, variant: Variant, lines: list[Line]) -> list[Line]:
    """Return the finished runs of one row, one a seed."""
    return [line for cell in grid.row(setting, variant) if (line := find(lines, cell))]


def routed(line: Line, protocol: Protocol, tau: Tau) -> dict[str, Any]:
    """Return the figures at one threshold; a model without an identifier has its own rule only."""
    rules: list[dict[str, Any]] = line[protocol]
    own = rules[line["default_rule"]]
    if tau == "own" or own["rule"] == "softmax":
        return own
    return next(rule for rule in rules if rule["tau"] == tau)


def variants_table(grid: Grid, lines: list[Line]) -> str:
    """Return one row a variant, of every setting of a grid."""
    columns: dict[str, Callable[[Line], float]] = {
        "aware known": lambda line: line["aware"]["known"],
        "aware novel": lambda line: line["aware"]["novel"],
        "on the pool": lambda line: line["aware"]["novel_pool"],
        "strict all, τ 0.99": lambda line: routed(line, "strict", 0.99)["all"],
        "strict all, own τ": lambda line: routed(line, "strict", "own")["all"],
        "AUROC": lambda line: 100 * line["auroc"],
        "forgetting": lambda line: line["forgetting"],
    }
    is_one = len(grid.settings) == 1
    rows = [[*([] if is_one else ["setting"]), "variant", *columns]]
    for setting in grid.settings:
        for variant in grid.variants:
            runs = runs_of(grid, setting, variant, lines)
            if runs:
                figures = [spread([get(run) for run in runs]) for get in columns.values()]
                rows.append([*([] if is_one else [setting]), variant.title, *figures])
    return markdown(rows)


def number_table(observed: Mapping[str, Any]) -> str:
    """Return how many novel classes each pool seemed to hold."""
    rows = [["pool", "novel classes", "estimate", "from", "to", "seconds"]]
    for cell in COUNTED:
        found = observed.get(f"number-{cell.setting}")
        if found is not None:
            keys = ("truth", "number", "low", "high", "seconds")
            rows.append([cell.setting, *(str(found[key]) for key in keys)])
    return markdown(rows)


def rounds_table(observed: Mapping[str, Any]) -> str:
    """Return the accuracy on the classes of each round, after each."""
    titles = {
        "round 1": "after the first round",
        "round 2": "after the second round",
        "one round": "both pools in one round",
    }
    kept = {**observed.get("rounds", {}), **observed.get("one-round", {})}
    groups = ("labelled", "round 1", "round 2")
    protocols = {"aware": "task-aware", "strict": "strict"}
    rows = [["", *(f"{title}: {group}" for title in protocols.values() for group in groups)]]
    for name, title in titles.items():
        if name in kept:
            scores = [kept[name][protocol].get(group) for protocol in protocols for group in groups]
            rows.append([title, *("" if score is None else f"{score:.2f}" for score in scores)])
    return markdown(rows)


def seeds_table(grid: Grid, lines: list[Line]) -> str:
    """Return the runs of the first variant of a grid with a single setting, one row a seed."""
    header = "seed,after supervised,aware known,aware novel,strict known,strict novel,strict all"
    rows = [[*header.split(","), "τ", "seconds", "commit"]]
    for run in runs_of(grid, grid.settings[0], grid.variants[0], lines):
        strict = routed(run, "strict", "own")
        figures = [
            run["after_supervised"]["known"],
            run["aware"]["known"],
            run["aware"]["novel"],
            *(strict[part] for part in PARTS),
        ]
        rows.append(
            [
                str(run["seed"]),
                *(f"{figure:.2f}" for figure in figures),
                f"{strict['tau']:.4f}",
                f"{sum(run['seconds']):.0f}",
                f"`{(run['commit'] or 'unknown')[:9]}`",
            ]
        )
    return markdown(rows)


def summary_table(grid: Grid, lines: list[Line]) -> str:
    """Return what a newcomer wants to know of the first variant of a grid."""
    runs = runs_of(grid, grid.settings[0], grid.variants[0], lines)

    def means(get: Callable[[Line, str], float]) -> list[str]:
        return [spread([get(run, part) for run in runs]) for part in PARTS]

    rows = [["", *PARTS]]
    after = spread([run["after_supervised"]["known"] for run in runs])
    rows.append(["after the supervised phase", after, "", ""])
    rows.append(["task-aware", *means(lambda run, part: run["aware"][part])])
    titles: dict[Protocol, str] = {"agnostic": "task-agnostic", "strict": "strict"}
    for protocol, title in titles.items():
        figures = [[routed(run, protocol, "own")[part] for run in runs] for part in PARTS]
        rows.append([f"{title}, calibrated τ", *map(spread, figures)])
    for name, title in (("pixels", "raw pixels"), ("features", "supervised features")):
        rows.append([f"k-means on {title}", "", spread([r["kmeans"][name] for r in runs]), ""])
    return markdown(rows)


def overview_table(lines: list[Line]) -> str:
    """Return `all` of the paper and of this project on every setting: README's table."""
    grid = GRIDS["main"]
    ours: dict[str, Callable[[Line], float]] = {
        "task-aware": lambda line: line["aware"]["all"],
        "task-agnostic": lambda line: routed(line, "agnostic", "own")["all"],
    }
    theirs = {"task-aware": paper.TASK_AWARE, "task-agnostic": paper.GENERALIZED}
    rows = [["", *CIFAR_SETTINGS]]
    for title, get in ours.items():
        for method in ("uno", "ncdwf"):
            figures = [theirs[title][setting][method].all for setting in CIFAR_SETTINGS]
            rows.append([f"{title}, paper: {TITLES[method]}", *(f"{f:.2f}" for f in figures)])
        for variant in grid.variants:
            by_setting = [runs_of(grid, setting, variant, lines) for setting in CIFAR_SETTINGS]
            row = [spread([get(run) for run in runs]) for runs in by_setting]
            rows.append([f"{title}, here: `{variant.title}`", *row])
    return markdown(rows)


def main_table(lines: list[Line], kind: Literal["aware", "agnostic", "strict"], tau: Tau) -> str:
    """Return known, novel and all of every method on every setting, the paper's rows first."""
    rows = [_header("", CIFAR_SETTINGS)]
    published = {"aware": paper.TASK_AWARE, "agnostic": paper.GENERALIZED}.get(kind)
    if published is not None:
        for method in published[CIFAR_SETTINGS[0]]:
            figures = [published[setting][method] for setting in CIFAR_SETTINGS]
            rows.append([f"paper: {TITLES[method]}", *_printed(figures)])

    def value(run: Line, part: str) -> float:
        return float(run["aware"][part] if kind == "aware" else routed(run, kind, tau)[part])

    grid = GRIDS["main"]
    for variant in grid.variants:
        by_setting = [runs_of(grid, setting, variant, lines) for setting in CIFAR_SETTINGS]
        row = [spread([value(run, part) for run in runs]) for runs in by_setting for part in PARTS]
        rows.append([f"`{variant.title}`", *row])
    return markdown(rows + _baseline_rows(lines) if kind == "aware" else rows)


def _baseline_rows(lines: list[Line]) -> list[list[str]]:
    """Return the rows without learning, and the accuracy before discovery."""
    grid = GRIDS["main"]
    by_setting = [runs_of(grid, setting, MAIN, lines) for setting in CIFAR_SETTINGS]
    rows = []
    for name, title in (("pixels", "k-means on raw pixels"), ("features", "k-means on features")):
        cells = [["", spread([r["kmeans"][name] for r in runs]), ""] for runs in by_setting]
        rows.append([title, *itertools.chain(*cells)])
    cells = [
        [spread([r["after_supervised"]["known"] for r in runs]), "", ""] for runs in by_setting
    ]
    rows.append(["after the supervised phase", *itertools.chain(*cells)])
    return rows


def tau_table(lines: list[Line]) -> str:
    """Return task-agnostic figures over the threshold; below each row the paper's."""
    grid = GRIDS["main"]
    by_setting = [runs_of(grid, setting, MAIN, lines) for setting in CIFAR_SETTINGS]
    rows = [_header("τ", CIFAR_SETTINGS)]

    def row(tau: Tau) -> list[str]:
        return [
            spread([routed(run, "agnostic", tau)[part] for run in runs])
            for runs in by_setting
            for part in PARTS
        ]

    for tau in PAPER_TAUS:
        rows.append([str(tau), *row(tau)])
        rows.append(["paper", *_printed([paper.TAU[setting][tau] for setting in CIFAR_SETTINGS])])
    return markdown([*rows, ["calibrated", *row("own")]])


def comparison_table(
    grid: Grid, lines: list[Line], published: Callable[[str, str], paper.Row | None]
) -> str:
    """Return task-aware figures of every variant; below each row the paper's, if it has one."""
    rows = [_header("", grid.settings)]
    for variant in grid.variants:
        row = [variant.title]
        for setting in grid.settings:
            runs = runs_of(grid, setting, variant, lines)
            row += [spread([run["aware"][part] for run in runs]) for part in PARTS]
        rows.append(row)
        figures = [published(setting, variant.name) for setting in grid.settings]
        if None not in figures:
            rows.append(["paper", *_printed([figure for figure in figures if figure])])
    return markdown(rows)


def _header(first: str, settings: tuple[str, ...]) -> list[str]:
    return [first, *(f"{setting} {part}" for setting in settings for part in PARTS)]


def _printed(figures: list[paper.Row]) -> list[str]:
    return [f"{getattr(figure, part):.2f}" for figure in figures for part in PARTS]


def _ablation(setting: str, variant: str) -> paper.Row | None:
    names = {"replay-only": "replay", "information-only": "information", "main": "both"}
    return paper.ABLATION[setting].get(names.get(variant, ""))


def _alpha(setting: str, variant: str) -> paper.Row | None:
    shapes = {"beta-1-1": (1, 1), "beta-100-1": (100, 1), "main": (1, 100)}
    return paper.ALPHA[setting][shapes[variant]]


def blocks(lines: list[Line], observed: Mapping[str, Any]) -> dict[str, str]:
    """Return every generated block of the documents by its name.

    Args:
        lines: the finished runs.
        observed: what is kept of single runs beside their scores.
    """
    digits = GRIDS["digits"]
    return {
        "digits-summary": summary_table(digits, lines),
        "digits-seeds": seeds_table(digits, lines),
        "digits-ablation": variants_table(digits, lines),
        "digits-proxy": variants_table(GRIDS["digits-proxy"], lines),
        "readings": variants_table(GRIDS["readings"], lines),
        "overview": overview_table(lines),
        "main-aware": main_table(lines, "aware", "own"),
        "main-agnostic": main_table(lines, "agnostic", "own"),
        "main-agnostic-0.99": main_table(lines, "agnostic", 0.99),
        "main-strict": main_table(lines, "strict", "own"),
        "tau": tau_table(lines),
        "ablation": comparison_table(GRIDS["ablation"], lines, _ablation),
        "alpha": comparison_table(GRIDS["alpha"], lines, _alpha),
        "mixed": variants_table(GRIDS["mixed"], lines),
        "imbalance": variants_table(GRIDS["imbalance"], lines),
        "digits-mixed": variants_table(GRIDS["digits-mixed"], lines),
        "digits-imbalance": variants_table(GRIDS["digits-imbalance"], lines),
        "number": number_table(observed),
        "rounds": rounds_table(observed),
    }


TABLES = {
    "main": ("main-aware", "main-agnostic", "main-agnostic-0.99", "main-strict"),
    "tau": ("tau",),
    "readings": ("readings",),
    "ablation": ("ablation",),
    "alpha": ("alpha",),
    "mixed": ("mixed",),
    "imbalance": ("imbalance",),
    "digits-mixed": ("digits-mixed",),
    "digits-imbalance": ("digits-imbalance",),
    "number": ("number",),
    "rounds": ("rounds",),
    "digits": ("digits-ablation",),
    "digits-proxy": ("digits-proxy",),
}
"""What `ncdwf reproduce` prints, by the name of the table."""


def fill(text: str, blocks: dict[str, str]) -> str:
    """Return a document with its generated blocks replaced.

    A block stands between `<!-- generated: name -->` and `<!-- end -->`.
    """
    for name, block in blocks.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if found:
            text = before + start + "\n" + block + "\n" + end + rest.partition(end)[2]
    return text


def spread(values: list[float]) -> str:
    """Return the mean and, of several values, the standard deviation; a dash for none."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "–"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def markdown(rows: list[list[str]]) -> str:
    """Return a table; the first row is its header, all but the first column hold numbers."""
    header, *body = rows
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *body))
