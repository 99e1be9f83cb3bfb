"""What a model holds, tensor by tensor."""

import pytest
from test_model import whole_model

from ncdwf import storage
from ncdwf.model.archive import WEIGHTS_FILE
from ncdwf.model.holdings import DERIVED_FROM


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
def test_every_stored_tensor_says_what_it_is_made_from(spread):
    model = whole_model(spread=spread)
    used = set()
    for name in model.state_dict():
        prefix = max((p for p in DERIVED_FROM if f"{name}.".startswith(f"{p}.")), key=len)
        used.add(prefix)
        # Statistics and thresholds are told one by one; weights by the part they belong to.
        if name.startswith("statistics.") or "tau" in name:
            assert prefix == name
        (holding,) = (h for h in model.holdings() if h.name == name)
        assert holding.derived_from == DERIVED_FROM[prefix]
    assert used == set(DERIVED_FROM)


def test_holdings_list_every_tensor_and_its_size(tmp_path):
    model = whole_model()
    model.save(tmp_path)
    holdings = {holding.name: holding for holding in model.holdings()}
    stored = storage.parse_tensors((tmp_path / WEIGHTS_FILE).read_bytes(), tmp_path)
    assert {name: h.shape for name, h in holdings.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert holdings["identifier.tau"].num_bytes == 8  # one double
    assert holdings["identifier.tau"].value == model.tau
    assert holdings["known_head.prototypes"].value is None
    num_features = model.backbone.num_features
    assert holdings["known_head.prototypes"].num_bytes == 2 * num_features * 4  # single floats
