"""Batches: which one comes when follows from seed and position alone."""

import torch
from test_loop import STEPS, make_source

from ncdwf.learning.batches import TensorSource


def test_every_epoch_is_another_order_of_distinct_entries() -> None:
    source = make_source()
    assert source.num_steps == STEPS
    orders = []
    for epoch in range(2):
        rows = torch.cat([source.batch(epoch, step)[0] for step in range(STEPS)])
        assert len(torch.unique(rows, dim=0)) == 20
        orders.append(rows)
    assert not torch.equal(*orders)


def test_batch_follows_from_its_position_alone() -> None:
    straight, jumping = make_source(), make_source()
    for epoch in range(2):
        for step in range(STEPS):
            straight.batch(epoch, step)
    wanted = straight.batch(1, 3)
    torch.rand(3)
    assert all(map(torch.equal, jumping.batch(1, 3), wanted))
    for other in (make_source(seed=1), make_source(phase="other")):
        assert not torch.equal(other.batch(1, 3)[0], wanted[0])


def test_entries_of_a_batch_stay_together() -> None:
    numbers = torch.arange(10)
    source = TensorSource(numbers, 10 * numbers, batch_size=3, seed=0, phase="test")
    first, second = source.batch(0, 1)
    assert torch.equal(second, 10 * first)


def test_small_data_make_one_smaller_batch() -> None:
    source = TensorSource(torch.arange(3), batch_size=8, seed=0, phase="test")
    assert (source.batch_size, source.num_steps) == (3, 1)
    assert sorted(source.batch(0, 0)[0].tolist()) == [0, 1, 2]


def test_of_some_rows_no_other_is_given() -> None:
    numbers, rows = torch.arange(100), torch.tensor([3, 5, 20, 70, 99])
    source = TensorSource(numbers, batch_size=2, seed=0, phase="test", rows=rows)
    assert (source.batch_size, source.num_steps) == (2, 2)
    given = torch.cat([source.batch(epoch, step)[0] for epoch in range(20) for step in range(2)])
    assert set(given.tolist()) == set(rows.tolist())
    # As if there were no others.
    alone = TensorSource(numbers[rows], batch_size=2, seed=0, phase="test")
    assert torch.equal(source.batch(3, 1)[0], alone.batch(3, 1)[0])
