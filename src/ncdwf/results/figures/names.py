"""What methods, settings and runs are called in pictures."""

from dataclasses import dataclass

METHODS = {
    "ncdwf": "NCDwF",
    "uno": "UNO",
    "rs": "RS",
    "ncl": "NCL",
    "ncdwf-gauss": "ncdwf-gauss",
}
SETTINGS = (
    "cifar10-5-5",
    "cifar100-80-20",
    "cifar100-50-50",
    "cifar100-20-80",
    "imagenet-882-30",
    "digits-5-5",
)


def method_title(name: str) -> str:
    """Return a method's name as the paper writes it, or as it is."""
    return METHODS.get(name, name)


def setting_title(name: str) -> str:
    """Return a setting's name with its data set as that is usually written.

    >>> setting_title("cifar100-80-20")
    'CIFAR-100-80-20'
    """
    return name.replace("cifar", "CIFAR-").replace("imagenet", "ImageNet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run that a picture shows."""

    setting: str
    method: str
    seed: int

    @property
    def title(self) -> str:
        """Return what a picture says of its run.

        >>> Origin(setting="cifar10-5-5", method="ncdwf", seed=3).title
        'NCDwF on CIFAR-10-5-5, seed 3'
        """
        return f"{method_title(self.method)} on {setting_title(self.setting)}, seed {self.seed}"
