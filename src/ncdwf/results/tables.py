"""Tables in Markdown, made of finished runs; the paper's numbers stand beside ours."""

import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ncdwf.errors import InputError
from ncdwf.results import paper
from ncdwf.results.benchmark import Line, find
from ncdwf.results.evaluation import PAPER_TAU, PAPER_TAUS
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
        "strict all, τ 0.99": lambda line: routed(line, "strict", PAPER_TAU)["all"],
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
    return markdown(rows, num_names=1 if is_one else 2)


def number_table(observed: Mapping[str, Any]) -> str:
    """Return how many novel classes each pool seemed to hold."""
    rows = [["pool", "novel classes", "estimate", "error", "from", "to", "seconds"]]
    for cell in COUNTED:
        found = observed.get(f"number-{cell.setting}")
        if found is not None:
            error = f"{found['number'] - found['truth']:+d}"
            rest = (found[key] for key in ("low", "high", "seconds"))
            values = (cell.setting, found["truth"], found["number"], error, *rest)
            rows.append(list(map(str, values)))
    return markdown(rows)


def rounds_table(observed: Mapping[str, Any]) -> str:
    """Return the accuracy on the classes of each round, after each."""
    titles = {
        "round 1": "after the first round",
        "promoted": "then, one head for all of them",
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
                f"`{_short(run['commit'] or 'unknown')}`",
            ]
        )
    return markdown(rows)


def _short(commits: str) -> str:
    """Return commits, of which a resumed run has several, without what nobody reads of them."""
    return re.sub(r"(\b[0-9a-f]{9})[0-9a-f]+", r"\1", commits)


def summary_table(grid: Grid, lines: list[Line]) -> str:
    """Return what a newcomer wants to know of the first variant of a grid."""
    runs = runs_of(grid, grid.settings[0], grid.variants[0], lines)

    rows = [["", *PARTS]]
    after = spread([run["after_supervised"]["known"] for run in runs])
    rows.append(["after the supervised phase", after, "", ""])
    rows.append(["task-aware", *_means([run["aware"] for run in runs])])
    titles: dict[Protocol, str] = {"agnostic": "task-agnostic", "strict": "strict"}
    for protocol, title in titles.items():
        figures = _means([routed(run, protocol, "own") for run in runs])
        rows.append([f"{title}, calibrated τ", *figures])
    for name, title in (("pixels", "raw pixels"), ("features", "supervised features")):
        rows.append([f"k-means on {title}", "", spread([r["kmeans"][name] for r in runs]), ""])
    return markdown(rows)


def overview_table(lines: list[Line]) -> str:
    """Return `all` of the paper and of this project on every setting: README's table."""
    grid, rows = GRIDS["main"], [["", *CIFAR_SETTINGS]]

    def add(title: str, variants: tuple[Variant, ...], get: Callable[[Line], float]) -> None:
        for variant in variants:
            by_setting = [runs_of(grid, setting, variant, lines) for setting in CIFAR_SETTINGS]
            row = [spread([get(run) for run in runs]) for runs in by_setting]
            rows.append([f"{title}, here: `{variant.title}`", *row])

    def add_paper(title: str, published: Mapping[str, Mapping[str, paper.Row]]) -> None:
        for method in ("uno", "ncdwf"):
            figures = [published[setting][method].all for setting in CIFAR_SETTINGS]
            rows.append([f"{title}, paper: {TITLES[method]}", *(f"{f:.2f}" for f in figures)])

    add_paper("task-aware", paper.TASK_AWARE)
    add("task-aware", grid.variants, lambda run: run["aware"]["all"])
    add_paper("task-agnostic", paper.GENERALIZED)
    add("task-agnostic", grid.variants, lambda run: routed(run, "agnostic", "own")["all"])
    add("task-agnostic, τ 0.99", (MAIN,), lambda run: routed(run, "agnostic", PAPER_TAU)["all"])
    return markdown(rows)


def main_table(lines: list[Line], kind: Literal["aware", "agnostic", "strict"], tau: Tau) -> str:
    """Return known, novel and all of every method on every setting."""
    published = {"aware": paper.TASK_AWARE, "agnostic": paper.GENERALIZED}.get(kind, {})
    grid, rows = GRIDS["main"], []
    for setting in CIFAR_SETTINGS:
        theirs = dict(published.get(setting, {}))
        for variant in grid.variants:
            runs = runs_of(grid, setting, variant, lines)
            ours = [run["aware"] if kind == "aware" else routed(run, kind, tau) for run in runs]
            row = theirs.pop(variant.method, None)
            rows.append(_Row(setting, f"`{variant.title}`", _means(ours), row))
        rows += [_Row(setting, TITLES[name], None, theirs[name]) for name in reversed(theirs)]
        if kind == "aware":
            rows += _baselines(setting, runs_of(grid, setting, MAIN, lines))
    return side_by_side(rows)


def tau_table(lines: list[Line]) -> str:
    """Return task-agnostic figures over the threshold."""
    rows = []
    for setting in CIFAR_SETTINGS:
        runs = runs_of(GRIDS["main"], setting, MAIN, lines)
        taus: dict[str, Tau] = {**{str(tau): tau for tau in PAPER_TAUS}, "calibrated": "own"}
        for title, tau in taus.items():
            ours = _means([routed(run, "agnostic", tau) for run in runs])
            theirs = None if tau == "own" else paper.TAU[setting][tau]
            rows.append(_Row(setting, title, ours, theirs))
    return side_by_side(rows, what="τ")


def comparison_table(
    grid: Grid, lines: list[Line], published: Callable[[str, str], paper.Row | None]
) -> str:
    """Return task-aware figures of every variant on every setting."""
    return side_by_side(
        [
            _Row(
                setting,
                variant.title,
                _means([run["aware"] for run in runs_of(grid, setting, variant, lines)]),
                published(setting, variant.name),
            )
            for setting in grid.settings
            for variant in grid.variants
        ]
    )


class _Row(NamedTuple):
    """What one row of a table sets side by side."""

    setting: str
    title: str
    ours: list[str] | None
    theirs: paper.Row | None


def side_by_side(rows: list[_Row], *, what: str = "") -> str:
    """Return known, novel and all: ours, and beside them the paper's where it has any."""
    has_paper = any(row.theirs for row in rows)
    titles = [f"paper: {part}" for part in PARTS] if has_paper else []
    table, last = [["setting", what, *PARTS, *titles]], ""
    for row in rows:
        printed = [f"{getattr(row.theirs, part):.2f}" if row.theirs else "" for part in PARTS]
        setting = row.setting if row.setting != last else ""
        table.append([setting, row.title, *(row.ours or 3 * [""]), *printed[: len(titles)]])
        last = row.setting
    return markdown(table, num_names=2)


def _means(figures: list[dict[str, Any]]) -> list[str]:
    return [spread([run[part] for run in figures]) for part in PARTS]


def _baselines(setting: str, runs: list[Line]) -> list[_Row]:
    """Return the rows without learning, and the accuracy before discovery."""
    pixels, features = (
        spread([r["kmeans"][name] for r in runs]) for name in ("pixels", "features")
    )
    after = spread([r["after_supervised"]["known"] for r in runs])
    return [
        _Row(setting, "k-means on raw pixels", ["", pixels, ""], None),
        _Row(setting, "k-means on features", ["", features, ""], None),
        _Row(setting, "after the supervised phase", [after, "", ""], None),
    ]


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
        "proxies": variants_table(GRIDS["proxies"], lines),
        "softmax": variants_table(GRIDS["softmax"], lines),
        "views": variants_table(GRIDS["views"], lines),
        "overview": overview_table(lines),
        "main-aware": main_table(lines, "aware", "own"),
        "main-agnostic": main_table(lines, "agnostic", "own"),
        "main-agnostic-0.99": main_table(lines, "agnostic", PAPER_TAU),
        "main-strict": main_table(lines, "strict", "own"),
        "tau": tau_table(lines),
        "ablation": comparison_table(GRIDS["ablation"], lines, _ablation),
        "ablation-routing": variants_table(GRIDS["ablation"], lines),
        "alpha": comparison_table(GRIDS["alpha"], lines, _alpha),
        "alpha-routing": variants_table(GRIDS["alpha"], lines),
        "mixed": variants_table(GRIDS["mixed"], lines),
        "imbalance": variants_table(GRIDS["imbalance"], lines),
        "digits-mixed": variants_table(GRIDS["digits-mixed"], lines),
        "digits-imbalance": variants_table(GRIDS["digits-imbalance"], lines),
        "number": number_table(observed),
        "rounds": rounds_table(observed),
    }


TABLES = {
    "main": ("overview", "main-aware", "main-agnostic", "main-agnostic-0.99", "main-strict"),
    "tau": ("tau",),
    "readings": ("readings",),
    "proxies": ("proxies",),
    "softmax": ("softmax",),
    "views": ("views",),
    "ablation": ("ablation", "ablation-routing"),
    "alpha": ("alpha", "alpha-routing"),
    "mixed": ("mixed",),
    "imbalance": ("imbalance",),
    "digits-mixed": ("digits-mixed",),
    "digits-imbalance": ("digits-imbalance",),
    "number": ("number",),
    "rounds": ("rounds",),
    "digits": ("digits-summary", "digits-seeds", "digits-ablation"),
    "digits-proxy": ("digits-proxy",),
}
"""What `ncdwf reproduce` prints and a document may hold, by the name of the table."""


def blocks_in(text: str) -> list[str]:
    """Return the names of the generated blocks of a document."""
    return re.findall(r"<!-- generated: (.*) -->\n", text)


def fill(text: str, blocks: dict[str, str]) -> str:
    """Return a document with its generated blocks replaced.

    A block stands between `<!-- generated: name -->` and `<!-- end -->`.
    """
    for name, block in blocks.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if found:
            inside, ended, after = rest.partition(end)
            if not ended or "<!-- generated: " in inside:
                raise InputError(f"the generated block {name!r} has no {end}")
            text = before + start + "\n" + block + "\n" + end + after
    return text


def spread(values: list[float]) -> str:
    """Return the mean and, of several values, the standard deviation; a dash for none."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "–"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def markdown(rows: list[list[str]], *, num_names: int = 1) -> str:
    """Return a table; the first row is its header, all but the first columns hold numbers."""
    header, *body = rows
    rule = ["---"] * num_names + ["---:"] * (len(header) - num_names)
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *body))
