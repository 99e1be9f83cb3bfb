"""Errors that memory runs out by: one line, and others as they are."""

from dataclasses import replace

import pytest
import torch
from conftest import shorter
from torch import nn

from ncdwf.errors import InputError, enough_memory
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.supervised import learn_known


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.zeros(2**58),  # more than any machine has
        lambda: torch.ones(1).expand(2**58).contiguous(),
        lambda: bytearray(2**60),
    ],
)
def test_memory_that_runs_out_is_one_line_with_advice(ask):
    with pytest.raises(InputError, match=r"more memory than there is; .*batch_size") as caught:
        enough_memory()(ask)()
    assert "\n" not in str(caught.value)


def test_what_a_gpu_says_is_understood():
    @enough_memory()
    def ask():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(InputError, match="more memory than there is"):
        ask()


class Hungry(nn.Module):
    """Asks for more memory than there is if it learns, or if it does not."""

    where: bool | None = None

    def forward(self, images):
        if self.training == Hungry.where and len(images) > 2:  # two are read to see what comes out
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return images.flatten(1)


def test_whatever_is_done_memory_that_runs_out_is_one_line(split, config, monkeypatch):
    def learn():
        images, labels = split.known_images, split.known_labels
        return learn_known(images, labels, config, backbone=Hungry())

    config = replace(shorter(config), backbone="custom")
    model = learn()
    method = make_method(config.method)
    steps = {
        True: (learn, lambda: discover(model, split.pool_images, method, config)),
        False: (
            lambda: model.predict(split.test_images),
            lambda: model.features(split.test_images),
        ),
    }
    for where, asking in steps.items():
        monkeypatch.setattr(Hungry, "where", where)
        for step in asking:
            with pytest.raises(InputError, match="more memory than there is"):
                step()


@pytest.mark.parametrize("error", [RuntimeError("another"), ValueError("memory"), KeyError("x")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, enough_memory():
        raise error
    assert caught.value is error
