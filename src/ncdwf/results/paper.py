"""The published numbers: Joseph et al., Novel Class Discovery without Forgetting, ECCV 2022.

Accuracies in percent, as printed. The paper's "Lab" and "Unlab" are known and novel here, and the
method that it calls "Ours" is `ncdwf`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Three numbers that stand side by side in the paper."""

    known: float
    novel: float
    all: float


TASK_AWARE: dict[str, dict[str, Row]] = {
    "cifar10-5-5": {
        "rs": Row(20.00, 84.48, 52.24),
        "ncl": Row(20.00, 59.96, 39.98),
        "uno": Row(33.16, 93.22, 63.19),
        "ncdwf": Row(92.72, 90.32, 91.52),
    },
    "cifar100-80-20": {
        "rs": Row(44.1, 55.7, 49.9),
        "ncl": Row(13.59, 57.9, 35.75),
        "uno": Row(2.01, 72.78, 37.39),
        "ncdwf": Row(65.03, 77.03, 71.03),
    },
    "cifar100-50-50": {
        "rs": Row(18.14, 32.56, 25.35),
        "ncl": Row(10.14, 12.18, 11.16),
        "uno": Row(1.76, 53.85, 27.81),
        "ncdwf": Row(73.18, 55.66, 64.42),
    },
    "cifar100-20-80": {
        "rs": Row(13.05, 11.5, 12.28),
        "ncl": Row(12.65, 4.73, 8.69),
        "uno": Row(7.95, 48.7, 28.33),
        "ncdwf": Row(84.8, 49.67, 67.24),
    },
    "imagenet-882-30": {
        "rs": Row(3.34, 24.54, 13.94),
        "ncl": Row(1.52, 11.45, 6.49),
        "uno": Row(0.75, 63.4, 32.08),
        "ncdwf": Row(27.46, 79.07, 53.27),
    },
}
"""Table 2, upper half: task-aware evaluation, by setting and method."""

GENERALIZED: dict[str, dict[str, Row]] = {
    "cifar10-5-5": {"uno": Row(0.0, 71.36, 35.68), "ncdwf": Row(79.68, 73.66, 76.67)},
    "cifar100-80-20": {"uno": Row(0.0, 58.15, 29.08), "ncdwf": Row(53.23, 60.6, 56.92)},
    "cifar100-50-50": {"uno": Row(0.0, 34.22, 17.11), "ncdwf": Row(62.76, 36.42, 49.59)},
    "cifar100-20-80": {"uno": Row(0.0, 41.61, 20.81), "ncdwf": Row(57.85, 42.18, 50.02)},
    "imagenet-882-30": {"uno": Row(0.0, 68.34, 34.17), "ncdwf": Row(21.32, 70.99, 46.16)},
}
"""Table 2, lower half: generalized (task-agnostic) evaluation, by setting and method."""

TAU: dict[str, dict[float, Row]] = {
    "cifar10-5-5": {
        0.8: Row(64.94, 80.66, 72.8),
        0.85: Row(66.21, 79.58, 72.9),
        0.9: Row(69.53, 77.83, 73.68),
        0.95: Row(72.55, 74.91, 73.73),
        0.99: Row(79.68, 73.66, 76.67),
        0.999: Row(85.05, 51.66, 68.36),
    },
    "cifar100-80-20": {
        0.8: Row(47.85, 70.51, 59.18),
        0.85: Row(48.73, 69.05, 58.89),
        0.9: Row(49.7, 69.14, 59.42),
        0.95: Row(52.24, 66.99, 59.62),
        0.99: Row(53.23, 60.6, 56.92),
        0.999: Row(61.42, 45.5, 53.46),
    },
    "cifar100-50-50": {
        0.8: Row(47.85, 51.95, 49.9),
        0.85: Row(48.63, 51.66, 50.15),
        0.9: Row(50.39, 50.87, 50.63),
        0.95: Row(53.32, 49.02, 51.17),
        0.99: Row(62.76, 36.42, 49.59),
        0.999: Row(69.23, 27.14, 48.19),
    },
    "cifar100-20-80": {
        0.8: Row(42.87, 48.73, 45.8),
        0.85: Row(44.33, 48.43, 46.38),
        0.9: Row(45.41, 47.94, 46.68),
        0.95: Row(49.31, 46.77, 48.04),
        0.99: Row(57.85, 42.18, 50.02),
        0.999: Row(65.62, 34.17, 49.9),
    },
}
"""Table 3: generalized evaluation of `ncdwf`, by setting and threshold τ of the identifier."""

ABLATION: dict[str, dict[str, Row]] = {
    "cifar10-5-5": {
        "upper-bound": Row(98.24, 94.15, 96.2),
        "replay": Row(92.12, 85.57, 88.85),
        "information": Row(34.12, 91.08, 62.6),
        "both": Row(92.72, 90.32, 91.52),
    },
    "cifar100-20-80": {
        "upper-bound": Row(88.85, 53.71, 71.28),
        "replay": Row(84.95, 43.34, 64.15),
        "information": Row(6.75, 50.97, 28.86),
        "both": Row(84.8, 49.67, 67.24),
    },
}
"""Table 4: task-aware evaluation, by setting and which parts of the method are there.

`replay` is the paper's PLR, `information` its MIR; the upper bound sees labelled and unlabelled
pictures together.
"""

ALPHA: dict[str, dict[tuple[int, int], Row]] = {
    "cifar10-5-5": {
        (1, 1): Row(92.92, 90.93, 91.93),
        (100, 1): Row(92.52, 91.31, 91.92),
        (1, 100): Row(92.72, 90.32, 91.52),
    },
    "cifar100-80-20": {
        (1, 1): Row(64.6, 76.17, 70.39),
        (100, 1): Row(64.8, 12.76, 38.78),
        (1, 100): Row(65.03, 77.03, 71.03),
    },
    "cifar100-50-50": {
        (1, 1): Row(73.74, 55.22, 64.48),
        (100, 1): Row(74.06, 42.95, 58.51),
        (1, 100): Row(73.18, 55.66, 64.42),
    },
    "cifar100-20-80": {
        (1, 1): Row(84.75, 47.07, 65.91),
        (100, 1): Row(84.95, 40.33, 62.64),
        (1, 100): Row(84.8, 49.67, 67.24),
    },
}
"""Table 6: task-aware evaluation of `ncdwf`, by setting and the (γ, ρ) of α ~ Beta(γ, ρ)."""
