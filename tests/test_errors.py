"""Errors that memory runs out by: one line, and others as they are."""

import pytest
import torch

from ncdwf.errors import InputError, enough_memory


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


@pytest.mark.parametrize("error", [RuntimeError("another"), ValueError("memory"), KeyError("x")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, enough_memory():
        raise error
    assert caught.value is error
