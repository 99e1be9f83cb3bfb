import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ncdwf.noise import Draw, draw, generator, pinned

positions = st.lists(st.integers() | st.text(), max_size=4)


def numbers(seed, position):
    return torch.rand(8, generator=generator(seed, *position))


@settings(max_examples=50, deadline=None)
@given(st.integers(), positions)
def test_same_seed_and_position_give_the_same_numbers(seed, position):
    torch.manual_seed(0)
    first = numbers(seed, position)
    torch.manual_seed(1)
    assert torch.equal(first, numbers(seed, position))


@settings(max_examples=50, deadline=None)
@given(st.integers(), positions, st.integers(), positions)
def test_other_seeds_and_positions_give_other_numbers(seed, position, other, elsewhere):
    assume((seed, position) != (other, elsewhere))
    assert not torch.equal(numbers(seed, position), numbers(other, elsewhere))


def test_pinned_generators_follow_the_position_and_go_on_where_they_were():
    torch.manual_seed(0)
    undisturbed = torch.rand(2, 4)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with pinned(3, "phase", 1):
            found.append(torch.rand(4))
    with pinned(3, "phase", 2):
        assert not torch.equal(torch.rand(4), found[0])
    assert torch.equal(*found)
    torch.manual_seed(0)
    first = torch.rand(4)
    with pinned(3, "phase", 1):
        torch.rand(4)
    assert torch.equal(torch.stack([first, torch.rand(4)]), undisturbed)


@pytest.mark.parametrize(
    ("left", "right"), [(("a", "b"), ("ab",)), ((1,), ("1",)), ((1, 2), (12,)), ((), ("",))]
)
def test_positions_do_not_run_into_each_other(left, right):
    assert not torch.equal(numbers(0, left), numbers(0, right))


def test_draws_have_the_asked_shape_and_distribution():
    wanted = {
        "flat": Draw(kind="uniform", shape=(500, 2)),
        "bell": Draw(kind="normal", shape=(1000,)),
    }
    drawn = draw(wanted, 20, generator(3, "test"))
    assert {name: tuple(d.shape) for name, d in drawn.items()} == {
        "flat": (20, 500, 2),
        "bell": (20, 1000),
    }
    # 20,000 draws: the standard error of both means is below 0.0071, of both deviations too.
    assert drawn["flat"].min() >= 0
    assert drawn["flat"].max() < 1
    assert drawn["flat"].mean() == pytest.approx(0.5, abs=0.02)
    assert drawn["flat"].std() == pytest.approx(12**-0.5, abs=0.02)
    assert drawn["bell"].mean() == pytest.approx(0, abs=0.04)
    assert drawn["bell"].std() == pytest.approx(1, abs=0.04)


def test_draws_do_not_depend_on_the_order_of_names():
    a, b = Draw(kind="uniform", shape=(3,)), Draw(kind="normal", shape=(2,))
    one = draw({"a": a, "b": b}, 2, generator(0))
    other = draw({"b": b, "a": a}, 2, generator(0))
    assert all(torch.equal(one[name], other[name]) for name in "ab")


def test_drawing_leaves_the_global_random_state_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    draw({"a": Draw(kind="normal", shape=(3,))}, 4, generator(0, "x"))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
