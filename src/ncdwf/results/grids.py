"""The grids of runs behind every table: what is run, and under which name."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ncdwf.config import Config, override
from ncdwf.recipes import FEWEST_SETTLING_STEPS, recipe
from ncdwf.results.configuration import complete

CIFAR_SETTINGS = ("cifar10-5-5", "cifar100-80-20", "cifar100-50-50", "cifar100-20-80")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of a table: what differs from the recipe of its method, as on the command line."""

    name: str
    title: str = field(compare=False)
    """What its row is called, which may differ from table to table."""
    method: str = "ncdwf"
    sets: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = field(default=None, compare=False)
    """Others than those of the grid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run."""

    setting: str
    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Return a name that is good for a directory."""
        return f"{self.setting}-{self.variant.method}-{self.variant.name}-seed{self.seed}"

    @property
    def config(self) -> Config:
        """Return the whole configuration of this run."""
        config = complete(replace(recipe(self.setting, self.variant.method), seed=self.seed))
        config = override(config, *self.variant.sets)
        if self == MATURITY:
            config = replace(config, snapshot_epochs=SNAPSHOT_EPOCHS)
        return complete(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Runs that belong into one table."""

    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]

    def cells(self) -> Iterator[Cell]:
        """Yield every run; those that share a supervised phase come one after the other."""
        for setting in self.settings:
            every = {seed for variant in self.variants for seed in self._seeds(variant)}
            for seed in sorted(every):
                for variant in self.variants:
                    if seed in self._seeds(variant):
                        yield Cell(setting=setting, variant=variant, seed=seed)

    def row(self, setting: str, variant: Variant) -> list[Cell]:
        """Return the runs of one row, one a seed."""
        return [Cell(setting=setting, variant=variant, seed=seed) for seed in self._seeds(variant)]

    def _seeds(self, variant: Variant) -> tuple[int, ...]:
        return self.seeds if variant.seeds is None else variant.seeds


HALF = ("supervised.optim.epochs=100", "discovery.optim.epochs=100")
"""Half of the epochs are enough to compare readings, or pools."""


def _half(name: str, title: str, *sets: str) -> Variant:
    return Variant(name=f"half-{name}", title=title, sets=(*HALF, *sets))


def _settled(variant: Variant) -> Variant:
    """Return a variant that is settled as `own_data` would settle so small a pool."""
    epochs = f"method.settling.epochs={FEWEST_SETTLING_STEPS}"  # of one step or a few
    return replace(variant, name=f"settled-{variant.name}", sets=(*variant.sets, epochs))


MAIN = Variant(name="main", title="ncdwf")
RECIPE = _half("recipe", "the recipe")
JOINT_SOFTMAX = "method.softmax=joint"
JOINT = _half("joint", "joint softmax", JOINT_SOFTMAX)
THREE_SEEDS = replace(MAIN, seeds=(0, 1, 2))
"""Beside runs of one seed: how much chance does."""
MATURITY = Cell(setting="cifar100-50-50", variant=MAIN, seed=0)
"""The run whose identifier is watched while it matures."""
SNAPSHOT_EPOCHS = 20
CONFUSION = Cell(setting="cifar100-20-80", variant=MAIN, seed=0)
"""The run of which it is shown what its known head takes novel classes for."""
TWO_ROUNDS = Cell(setting="cifar100-60-20", variant=MAIN, seed=0)
"""The run that goes on with a second round, and the one that is given both pools at once."""
ONE_ROUND = Cell(setting="cifar100-60-40", variant=MAIN, seed=0)
COUNTED = (
    *(Cell(setting=name, variant=MAIN, seed=0) for name in ("digits-5-5", *CIFAR_SETTINGS)),
    Cell(setting="cifar100-80-20-proxy-60-20", variant=RECIPE, seed=0),
    Cell(setting="cifar100-50-50-proxy-30-20", variant=RECIPE, seed=0),
)
"""The runs whose novel classes are counted before discovery."""
DIGITS_SEEDS = (0, 1, 2, 3, 4)

KNOWN_SHARES = (0, 25, 50, 75)
SIFTED = Variant(name="sifted", title="known pictures left out", sets=("discovery.pool=mixed",))
UNSIFTED = Variant(name="main", title="all taken for novel")
EQUAL = Variant(name="main", title="equal shares")
PARTIAL = Variant(
    name="partial", title="clear pictures first", sets=("method.clustering.balance=0.5",)
)
STRONG = _half(
    "strong",
    "two strong views in phase 1",
    "supervised.num_views=2",
    "supervised.view.resized=0.5",
    "supervised.view.jitter=0.6",
    "supervised.view.solarise=0.1",
    "supervised.view.equalise=0.1",
)


GRIDS = {
    "readings": Grid(
        settings=("cifar100-80-20-proxy-60-20",),
        seeds=(0,),
        variants=(
            RECIPE,
            JOINT,
            _half("pool-norms", "norms of the pool", "method.norms=pool"),
            _half(
                "during",
                "identifier during discovery, nothing settled after it",
                "method.identifier=during",
            ),
            _half("no-information", "no mutual information", "method.weight_information=0"),
            _half(
                "current",
                "its target from the model itself",
                "method.information_from=current",
            ),
            STRONG,
            _half(
                "augmented",
                "statistics of augmented views",
                "supervised.statistics_from=augmented",
            ),
            _half(
                "held-out",
                "statistics of a held-out tenth",
                "supervised.holdout=0.1",
                "supervised.statistics_from=held-out",
            ),
        ),
    ),
    "proxies": Grid(
        settings=("cifar100-80-20-proxy-60-20",),
        seeds=(0, 1, 2),
        variants=(RECIPE, JOINT, replace(RECIPE, title="ncdwf-gauss", method="ncdwf-gauss")),
    ),
    "softmax": Grid(
        settings=("cifar100-80-20-proxy-60-20", "cifar100-80-20-proxy-20-60"),
        seeds=(0,),
        variants=(RECIPE, JOINT),
    ),
    "views": Grid(
        settings=(
            "cifar100-80-20-proxy-60-20",
            "cifar100-80-20-proxy-20-60",
            "cifar100-50-50-proxy-30-20",
            "cifar100-20-80-proxy-12-8",
        ),
        seeds=(0, 1),
        variants=(replace(RECIPE, title="one mild view in phase 1"), STRONG),
    ),
    "main": Grid(
        settings=CIFAR_SETTINGS,
        seeds=(0, 1, 2),
        variants=(
            MAIN,
            Variant(name="main", title="uno", method="uno", seeds=(0,)),
            Variant(name="main", title="ncdwf-gauss", method="ncdwf-gauss", seeds=(0,)),
        ),
    ),
    "ablation": Grid(
        settings=("cifar10-5-5", "cifar100-20-80"),
        seeds=(0,),
        variants=(
            Variant(
                name="replay-only",
                title="pseudo-latent replay only",
                sets=("method.weight_information=0",),
            ),
            Variant(
                name="information-only",
                title="mutual information only",
                sets=("method.weight_replay=0",),
            ),
            THREE_SEEDS,
        ),
    ),
    "alpha": Grid(
        settings=CIFAR_SETTINGS,
        seeds=(0,),
        variants=(
            Variant(name="beta-1-1", title="Beta(1, 1)", sets=("method.rho=1",)),
            Variant(
                name="beta-100-1",
                title="Beta(100, 1)",
                sets=("method.gamma=100", "method.rho=1"),
            ),
            THREE_SEEDS,
        ),
    ),
    "mixed": Grid(
        settings=tuple(f"cifar100-80-20-mixed-{share}" for share in KNOWN_SHARES),
        seeds=(0,),
        variants=(_half(SIFTED.name, SIFTED.title, *SIFTED.sets), _half("main", UNSIFTED.title)),
    ),
    "imbalance": Grid(
        settings=("cifar100-80-20", *(f"cifar100-80-20-imbalance-{n}" for n in (10, 100))),
        seeds=(0,),
        variants=(EQUAL, PARTIAL),
    ),
    "digits-mixed": Grid(
        settings=tuple(f"digits-5-5-mixed-{share}" for share in KNOWN_SHARES),
        seeds=(0, 1, 2),
        variants=(_settled(SIFTED), _settled(UNSIFTED)),
    ),
    "digits-imbalance": Grid(
        settings=("digits-5-5", "digits-5-5-imbalance-10"),
        seeds=(0, 1, 2),
        variants=(EQUAL, PARTIAL),
    ),
    "digits": Grid(
        settings=("digits-5-5",),
        seeds=DIGITS_SEEDS,
        variants=(
            Variant(name="main", title="everything"),
            Variant(
                name="without-replay", title="without replay", sets=("method.weight_replay=0",)
            ),
            Variant(
                name="without-information",
                title="without the mutual-information regulariser",
                sets=("method.weight_information=0",),
            ),
            Variant(
                name="without-distillation",
                title="without distillation",
                sets=("method.weight_distill=0",),
            ),
            Variant(
                name="identifier-during",
                title="identifier trained during discovery, nothing settled after it",
                sets=("method.identifier=during",),
            ),
            Variant(name="joint", title="joint softmax", sets=(JOINT_SOFTMAX,)),
            Variant(name="held", title="norms held", sets=("method.norms=held",)),
            Variant(
                name="augmented-statistics",
                title="class statistics from augmented views",
                sets=("supervised.statistics_from=augmented",),
            ),
            Variant(name="main", title="ncdwf-gauss", method="ncdwf-gauss"),
            Variant(name="main", title="uno", method="uno"),
        ),
    ),
    "digits-proxy": Grid(
        settings=("digits-5-5-proxy-2-3",),
        seeds=DIGITS_SEEDS,
        variants=(
            Variant(name="main", title="the recipe"),
            Variant(name="main", title="ncdwf-gauss", method="ncdwf-gauss"),
            Variant(name="joint", title="joint softmax", sets=(JOINT_SOFTMAX,)),
            Variant(
                name="supervised-lr-0.05",
                title="supervised learning rate 0.05 instead of 0.02",
                sets=("supervised.optim.lr=0.05",),
            ),
            Variant(
                name="supervised-40",
                title="40 supervised epochs instead of 20",
                sets=("supervised.optim.epochs=40",),
            ),
            Variant(
                name="lr-0.1",
                title="discovery learning rate 0.1 instead of 0.2",
                sets=("discovery.optim.lr=0.1",),
            ),
            Variant(
                name="batch-128",
                title="discovery batch 128 instead of 64",
                sets=("discovery.optim.batch_size=128",),
            ),
            Variant(
                name="shift-0.5",
                title="views shifted by 0.5 pixels instead of 0.8",
                sets=("supervised.view.shift=0.5", "discovery.large.shift=0.5"),
            ),
            Variant(
                name="distill-1",
                title="distillation weight 1 instead of 3",
                sets=("method.weight_distill=1",),
            ),
            Variant(
                name="information-0.1",
                title="mutual-information weight 0.1 instead of 0.01",
                sets=("method.weight_information=0.1",),
            ),
            Variant(
                name="augmented-statistics",
                title="class statistics from augmented views",
                sets=("supervised.statistics_from=augmented",),
            ),
        ),
    ),
}
"""Runs that make a table each."""

RUNS: dict[str, tuple[Cell, ...]] = {
    **{name: tuple(grid.cells()) for name, grid in GRIDS.items()},
    "tau": tuple(cell for cell in GRIDS["main"].cells() if cell.variant == MAIN),
    "number": COUNTED,
    "rounds": (TWO_ROUNDS, ONE_ROUND),
    "figures": tuple(GRIDS["main"].cells()),
}
"""What `ncdwf reproduce` runs, by the name of the table."""

ABOUT = {
    "readings": ("other readings of the paper, one at a time, on a proxy split", 2),
    "proxies": ("which method is the default, on a proxy split", 3),
    "softmax": ("softmax over novel classes or over all, on two proxy splits", 3),
    "views": ("one mild view or two strong ones in phase 1, on four proxy splits", 3),
    "main": ("the paper's main table", 8),
    "ablation": ("the parts of the method, one at a time", 9),
    "alpha": ("how latents are mixed with class means", 8),
    "mixed": ("known classes in the pool", 2),
    "imbalance": ("novel classes of unequal size", 5),
    "digits-mixed": ("known classes in a pool of digits", 0),
    "digits-imbalance": ("novel digits of unequal number", 0),
    "digits": ("every seed on the digits, and the ablation", 0),
    "digits-proxy": ("how the recipe of the digits was chosen, on a proxy split", 0),
    "tau": ("the main table over the threshold τ", 8),
    "number": ("how many novel classes pools seem to hold", 6),
    "rounds": ("two rounds of discovery, and one with both pools", 6),
    "figures": ("the figures of the documents", 8),
}
"""What each is, and about how many minutes a run takes; `results/runs.jsonl` has the seconds.

Of CIFAR that is on an H200, of the digits on a CPU: less than one.
"""
