import dataclasses
import json
import re
from dataclasses import asdict

import pytest

from ncdwf.config import Config, from_dict
from ncdwf.data.setting import SETTINGS, Setting
from ncdwf.errors import InputError
from ncdwf.learning.discovery import METHODS
from ncdwf.recipes import RECIPES, recipe
from ncdwf.results.experiment import complete


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
        "overclustering": 3,
        "temperature": 0.1,
    }


def test_the_learning_rate_of_uno_on_cifar_is_the_published_one():
    assert recipe("cifar100-80-20", "uno").discovery.optim.lr == 0.4
    assert recipe("cifar100-80-20", "ncdwf").discovery.optim.lr == 0.1


@pytest.mark.parametrize("name", ["nothing-5-5", "digits", "digits-5-5 ", "digits-5", ""])
def test_there_is_no_recipe_for_an_unknown_setting(name):
    with pytest.raises(InputError, match=re.escape(f"no recipe for setting {name!r}")):
        recipe(name)
