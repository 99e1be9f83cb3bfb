"""Shapes of models."""

import dataclasses
import re

import pytest
from test_model import NOVEL, SHAPE

from ncdwf.errors import InputError


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SHAPE, "num_known", 0),
        (SHAPE, "temperature", -0.1),
        (SHAPE, "input_shape", ()),
        (SHAPE, "input_shape", (0,)),
        (SHAPE, "input_shape", (4, 4)),
        (SHAPE, "input_shape", (1, -4, 4)),
        (SHAPE, "input_shape", (1, 4, 4, 4)),
        (SHAPE, "num_discovered", -1),
        (SHAPE, "num_discovered", 3),
        (NOVEL, "num_novel", 0),
        (NOVEL, "temperature", 0.0),
    ],
)
def test_impossible_shapes_are_refused(kind, name, value):
    with pytest.raises(InputError, match=re.escape(f"{name}={value}")):
        dataclasses.replace(kind, **{name: value})
