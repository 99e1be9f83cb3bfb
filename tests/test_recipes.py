import dataclasses
import json
import re
from dataclasses import asdict, replace

import pytest

from ncdwf.config import Config, View, from_dict
from ncdwf.data.augment import check_view
from ncdwf.data.setting import SETTINGS, Setting
from ncdwf.errors import InputError
from ncdwf.learning.discovery import METHODS
from ncdwf.recipes import RECIPES, fit_discovery, fit_supervised, own_data, recipe
from ncdwf.results.configuration import complete
from ncdwf.results.experiment import check_shape


@pytest.mark.parametrize(("name", "num_novel"), [("5-5", 5), ("2-7", 7), ("5-5-proxy-2-3", 3)])
@pytest.mark.parametrize("data", RECIPES)
def test_recipes_follow_the_setting(data, name, num_novel):
    config = recipe(f"{data}-{name}")
    assert config.setting == f"{data}-{name}"
    assert config.discovery.num_novel == num_novel


every_method = pytest.mark.parametrize("method", sorted(METHODS))


@every_method
@pytest.mark.parametrize("setting", [name for name in SETTINGS if "imagenet" not in name])
def test_every_setting_has_a_recipe_for_every_method(setting, method):
    config = recipe(setting, method)
    assert config.setting == setting
    assert config.method["name"] == method
    assert config.discovery.num_novel == len(Setting.parse(setting).novel_classes)
    whole = complete(config)
    fields = {item.name for item in dataclasses.fields(METHODS[method])}
    assert set(whole.method) == {"name"} | fields
    assert from_dict(Config, json.loads(json.dumps(asdict(whole)))) == whole == complete(whole)
    # What the recipe says about the method is not lost on the way.
    given = {key: value for key, value in config.method.items() if not isinstance(value, dict)}
    assert given.items() <= whole.method.items()


@pytest.mark.parametrize("data", RECIPES)
def test_methods_differ_in_what_comes_after_the_supervised_phase(data):
    # Or a model of one method's supervised phase would not serve another.
    configs = [recipe(f"{data}-5-5", method) for method in METHODS]
    assert len({config.method["name"] for config in configs}) == len(METHODS)
    for config in configs:
        assert (config.supervised, config.backbone) == (configs[0].supervised, configs[0].backbone)


def test_a_recipe_is_for_the_papers_method_unless_another_is_named():
    assert recipe("digits-5-5") == recipe("digits-5-5", "ncdwf")
    assert recipe("digits-5-5").method["name"] == "ncdwf"


@every_method
@pytest.mark.parametrize("setting", ["cifar10-5-5", "cifar100-80-20", "cifar100-20-80"])
def test_cifar_follows_the_schedules_and_views_of_uno(setting, method):
    config = recipe(setting, method)
    assert config.backbone == "resnet18"
    supervised, discovery = config.supervised, config.discovery
    assert (supervised.optim.epochs, discovery.optim.epochs) == (200, 200)
    assert (supervised.optim.batch_size, discovery.optim.batch_size) == (512, 512)
    assert (discovery.num_large, discovery.num_small) == (2, 2)
    # Large views are as large as the picture; small ones show a part of it on 18 of 32 pixels.
    assert (discovery.large.size, discovery.small.size) == (0, 18)
    assert discovery.small.max_area < discovery.large.max_area == 1
    assert all(view.flip and view.jitter for view in (discovery.large, discovery.small))
    assert complete(config).method["clustering"] == {
        "num_heads": 4,
        "num_hidden": 2048,
        "num_projected": 256,
        "overclustering": 5,
        "temperature": 0.1,
        "balance": 1.0,
    }


@pytest.mark.parametrize("setting", ["cifar10-5-5", "cifar100-80-20", "cifar100-20-80"])
def test_methods_differ_on_cifar_by_nothing_but_their_own_options(setting):
    first, *others = (
        replace(recipe(setting, method), method={"name": "any"}) for method in METHODS
    )
    assert all(other == first for other in others)


@every_method
@pytest.mark.parametrize("setting", ["digits-5-5", "digits-5-5-proxy-2-3", "cifar100-80-20"])
@pytest.mark.parametrize("pool", ["mixed-50", "imbalance-10"])
def test_a_setting_with_another_pool_has_the_same_recipe(setting, pool, method):
    config = recipe(f"{setting}-{pool}", method)
    assert config.setting == f"{setting}-{pool}"
    assert replace(config, setting=setting) == recipe(setting, method)


@pytest.mark.parametrize("name", ["nothing-5-5", "digits", "digits-5-5 ", "digits-5", ""])
def test_there_is_no_recipe_for_an_unknown_setting(name):
    with pytest.raises(InputError, match=re.escape(f"no recipe for setting {name!r}")):
        recipe(name)


# Anybody's own data

SHAPES = [(64,), (1,), (1, 8, 8), (3, 8, 8), (1, 1, 1), (3, 32, 32), (1, 20, 48), (3, 64, 64)]
COUNTS = [1, 2, 15, 16, 40, 127, 128, 200, 255, 256, 512, 900, 4_096, 50_000, 200_000, 5_000_000]
both_devices = pytest.mark.parametrize("has_gpu", [False, True])


@pytest.mark.parametrize(
    ("shape", "has_gpu", "backbone"),
    [
        ((64,), False, "vector"),
        ((64,), True, "vector"),
        ((1, 12, 12), False, "small"),
        ((1, 12, 12), True, "small"),
        ((3, 13, 12), True, "resnet18"),
        ((3, 64, 64), True, "resnet18"),
        ((3, 64, 64), False, "small"),
    ],
)
def test_the_network_follows_from_data_and_device(shape, has_gpu, backbone):
    assert own_data(shape, has_gpu=has_gpu).backbone == backbone


@both_devices
@pytest.mark.parametrize("backbone", ["resnet18", "small", "timm:resnet50", "custom"])
def test_a_network_that_is_named_is_taken(backbone, has_gpu):
    assert own_data((3, 32, 32), backbone=backbone, has_gpu=has_gpu).backbone == backbone


@every_method
@both_devices
@pytest.mark.parametrize("shape", SHAPES)
def test_own_data_of_every_shape_has_a_whole_configuration(shape, has_gpu, method):
    config = own_data(shape, method=method, has_gpu=has_gpu)
    assert (config.setting, config.method["name"]) == ("own", method)
    assert config.discovery.num_novel == 0  # nobody has said how many yet
    # What takes minutes, or an hour, is not done thrice.
    is_quick = config.backbone != "resnet18" and max(shape[1:], default=0) <= 12
    assert config.discovery.tries == (3 if is_quick else 1)
    whole = complete(config)
    assert from_dict(Config, json.loads(json.dumps(asdict(whole)))) == whole
    check_shape(whole, shape)
    views = (config.supervised.view, config.discovery.large, config.discovery.small)
    for view in views:
        check_view(view, shape, name="view")


@every_method
@both_devices
@pytest.mark.parametrize("shape", SHAPES)
def test_methods_share_the_supervised_phase_of_own_data(shape, has_gpu, method):
    config, other = (own_data(shape, method=m, has_gpu=has_gpu) for m in (method, "ncdwf"))
    assert (config.supervised, config.backbone) == (other.supervised, other.backbone)


@every_method
def test_vectors_get_noise_alone_and_less_distillation(method):
    config = own_data((64,), method=method)
    assert config.supervised.view == config.discovery.large == View(noise=0.5)
    whole, digits = complete(config).method, complete(recipe("digits-5-5", method)).method
    if method == "uno":
        assert whole == digits
    else:
        assert whole == {**digits, "weight_distill": 1.0, "least_tau": 0.9}


@pytest.mark.parametrize(
    ("shape", "shift", "flip"),
    [((1, 8, 8), 0.8, False), ((3, 32, 32), 3.2, True), ((1, 20, 48), 2.0, False)],
)
def test_views_of_the_small_network_are_in_proportion(shape, shift, flip):
    config = own_data(shape)
    digits = recipe("digits-5-5")
    wanted = replace(digits.supervised.view, shift=shift, flip=flip)
    assert config.supervised.view == config.discovery.large == wanted
    assert config.method == {**digits.method, "least_tau": 0.9}


@pytest.mark.parametrize(
    ("shape", "padding", "small"),
    [((3, 32, 32), 4, 18), ((3, 64, 64), 8, 36), ((1, 20, 48), 2, 11), ((3, 224, 224), 28, 126)],
)
@every_method
def test_views_of_large_networks_are_in_proportion(shape, padding, small, method):
    config = own_data(shape, method=method, backbone="resnet18")
    cifar = recipe("cifar100-80-20", method)
    flip = shape[0] == 3  # grey pictures are often of writing
    view = replace(cifar.supervised.view, padding=padding, flip=flip)
    assert config.supervised == replace(cifar.supervised, view=view)
    assert config.discovery == replace(
        cifar.discovery,
        num_novel=0,
        large=replace(cifar.discovery.large, padding=padding, flip=flip),
        small=replace(cifar.discovery.small, size=small, flip=flip),
    )
    assert config.method == cifar.method


def test_pictures_of_the_papers_size_get_the_papers_recipe():
    cifar = recipe("cifar100-80-20")
    config = own_data((3, 32, 32), has_gpu=True)
    discovery = replace(config.discovery, num_novel=20)
    assert replace(config, setting=cifar.setting, discovery=discovery) == cifar


# (network, with a GPU, pictures): batch, epochs and rate of the supervised phase, then of discovery
SCHEDULES = {
    ("vector", False, 40): ((16, 200, 0.005), (32, 200, 0.1)),
    ("vector", False, 200): ((16, 40, 0.005), (32, 200, 0.1)),
    ("vector", True, 200): ((16, 40, 0.005), (32, 200, 0.1)),
    ("vector", False, 900): ((64, 10, 0.02), (64, 56, 0.2)),
    ("vector", False, 200_000): ((64, 10, 0.02), (64, 10, 0.2)),
    ("small", False, 200): ((16, 80, 0.005), (32, 200, 0.1)),
    ("small", False, 300): ((32, 53, 0.01), (64, 200, 0.2)),
    ("small", False, 800): ((64, 20, 0.02), (64, 100, 0.2)),
    ("small", False, 200_000): ((64, 10, 0.02), (64, 10, 0.2)),
    ("resnet18", True, 200): ((16, 200, 0.00625), (32, 200, 0.125)),
    ("resnet18", True, 40_000): ((512, 200, 0.2), (512, 100, 2.0)),
    ("resnet18", True, 200_000): ((512, 40, 0.2), (512, 20, 2.0)),
    ("resnet18", False, 200): ((16, 100, 0.00625), (32, 100, 0.125)),
    ("resnet18", False, 200_000): ((512, 10, 0.2), (512, 10, 2.0)),
    ("custom", True, 200_000): ((512, 40, 0.2), (512, 20, 2.0)),
}


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_schedules_follow_from_the_amount_of_data(case):
    backbone, has_gpu, num_images = case
    shape = (64,) if backbone == "vector" else (3, 32, 32)
    config = own_data(shape, backbone=backbone, has_gpu=has_gpu)
    config = fit_supervised(config, num_images, has_gpu=has_gpu)
    config = fit_discovery(config, num_images, 7, has_gpu=has_gpu)
    assert config.discovery.num_novel == 7
    found = [
        (optim.batch_size, optim.epochs, pytest.approx(optim.lr))
        for optim in (config.supervised.optim, config.discovery.optim)
    ]
    assert tuple(found) == SCHEDULES[case]


@pytest.mark.parametrize(
    ("backbone", "num_images", "tries"),
    [("vector", 5_000, 3), ("vector", 5_001, 1), ("small", 8_000, 3), ("small", 200_000, 1)],
)
def test_a_large_pool_is_discovered_once(backbone, num_images, tries):
    shape = (64,) if backbone == "vector" else (3, 12, 12)
    config = own_data(shape, backbone=backbone)
    assert config.discovery.tries == 3
    assert fit_discovery(config, num_images, 7).discovery.tries == tries


@pytest.mark.parametrize(
    ("shape", "backbone"), [((64,), "custom"), ((3, 8, 8), "custom"), ((1, 13, 13), "small")]
)
def test_where_a_try_may_take_long_there_is_one(shape, backbone):
    assert own_data(shape, backbone=backbone).discovery.tries == 1


@pytest.mark.parametrize(("method", "has_settling"), [("ncdwf", True), ("uno", False)])
def test_the_fit_after_discovery_takes_as_many_steps_in_small_pools_and_in_large_ones(
    method, has_settling
):
    config = own_data((64,), method=method)
    epochs = [
        fit_discovery(config, count, 5).method.get("settling", {}).get("epochs")
        for count in (1, 141, 143, 500, 6_400, 20_000, 10_000_000)
    ]
    assert epochs == ([400, 400, 200, 60, 60, 21, 1] if has_settling else [None] * 7)


def test_a_method_that_recipes_do_not_know_keeps_its_defaults():
    assert recipe("digits-5-5", "mine").method == {"name": "mine"}
    assert recipe("cifar100-80-20", "mine").method == {"name": "mine"}
    assert own_data((64,), method="mine").method == {"name": "mine"}
    assert fit_discovery(own_data((64,), method="mine"), 50, 2).method == {"name": "mine"}


def test_the_digits_keep_about_the_epochs_of_their_recipe():
    # 0-4 and 5-9 of the digits have some 650 training pictures each.
    recommended = recipe("digits-5-5")
    config = fit_discovery(fit_supervised(own_data((1, 8, 8)), 650), 650, 5)
    for own, wanted in (
        (config.supervised.optim, recommended.supervised.optim),
        (config.discovery.optim, recommended.discovery.optim),
    ):
        assert own.batch_size == wanted.batch_size
        assert own.epochs == pytest.approx(wanted.epochs, rel=0.25)


@every_method
@both_devices
@pytest.mark.parametrize("backbone", ["vector", "small", "resnet18", "custom"])
def test_more_data_never_means_smaller_batches_or_more_epochs(backbone, has_gpu, method):
    shape = (64,) if backbone == "vector" else (3, 32, 32)
    config = own_data(shape, method=method, backbone=backbone, has_gpu=has_gpu)
    fitted = [
        fit_discovery(fit_supervised(config, count, has_gpu=has_gpu), count, 2, has_gpu=has_gpu)
        for count in COUNTS
    ]
    for phase, steps, smallest in (("supervised", 8, 16), ("discovery", 4, 32)):
        start = getattr(config, phase).optim
        optims = [getattr(other, phase).optim for other in fitted]
        batches, epochs = [o.batch_size for o in optims], [o.epochs for o in optims]
        assert batches == sorted(batches)
        assert (batches[0], batches[-1]) == (smallest, start.batch_size)
        assert epochs == sorted(epochs, reverse=True)
        assert (epochs[0], epochs[-1]) == (200, 10)
        for count, optim in zip(COUNTS, optims, strict=True):
            assert count // optim.batch_size >= steps or optim.batch_size == smallest
            assert optim.lr / optim.batch_size == pytest.approx(start.lr / start.batch_size)
            assert optim.warmup_epochs <= min(start.warmup_epochs, optim.epochs / 10)
            changed = ("batch_size", "epochs", "lr", "warmup_epochs")
            same = {name: getattr(start, name) for name in changed}
            assert replace(optim, **same) == start


def test_a_long_training_warms_up_as_its_recipe_does():
    config = fit_supervised(own_data((3, 32, 32), has_gpu=True), 40_000, has_gpu=True)
    assert config.supervised.optim.warmup_epochs == 10
    assert fit_supervised(config, 200_000, has_gpu=True).supervised.optim.warmup_epochs == 4


def test_each_phase_is_fitted_alone():
    config = own_data((64,))
    supervised = fit_supervised(config, 200)
    assert supervised.supervised != config.supervised
    assert replace(supervised, supervised=config.supervised) == config
    discovery = fit_discovery(config, 200, 3)
    assert discovery.discovery.num_novel == 3
    assert replace(discovery, discovery=config.discovery, method=config.method) == config
