"""Configurations: which are the same, and which are a method's own."""

import json
from dataclasses import replace
from pathlib import Path

from conftest import shorter

from ncdwf.config import Config, override
from ncdwf.results.configuration import complete, config_record, is_record_of, variant


def test_variant_tells_the_recommended_configuration_from_others(tiny: Config) -> None:
    assert variant(tiny) == "main"
    same = replace(
        tiny, seed=5, device="auto", engine="eager", checkpoint_seconds=0.0, snapshot_epochs=2
    )
    assert variant(same) == "main"
    assert variant(override(tiny, "discovery.optim.lr=0.06")) == "custom"
    assert variant(replace(tiny, method={**tiny.method, "tau": 0.4})) == "custom"


def test_a_recorded_configuration_is_known_again_whatever_the_seed_and_the_machine(
    finished_run: Path, tiny: Config
) -> None:
    record = config_record(tiny)
    assert json.loads(json.dumps(record)) == record
    recorded = json.loads((finished_run / "scores.json").read_text())["config"]
    assert is_record_of(recorded, shorter(tiny))
    assert not is_record_of(recorded, tiny)
    same = replace(
        tiny, seed=5, device="auto", engine="eager", checkpoint_seconds=0.0, snapshot_epochs=2
    )
    assert is_record_of(record, same)
    for assignment in ("discovery.optim.lr=0.06", "setting=tiny-3-2", "method.tau=0.4"):
        assert not is_record_of(record, override(tiny, assignment)), assignment
    assert not is_record_of({**record, "unheard": 1}, tiny)


def test_what_a_later_version_adds_counts_as_its_default(tiny: Config) -> None:
    record = config_record(tiny)
    del record["supervised"]["view"]["hue"], record["method"]["rho"]
    assert is_record_of(record, tiny)
    assert not is_record_of(record, override(complete(tiny), "method.rho=3"))
