"""scikit-learn's handwritten digits: 1,797 grey pictures of 8×8 pixels, no download."""

from pathlib import Path

import numpy as np
import torch

from ncdwf.data.inputs import TrainAndTest

CLASS_NAMES = tuple(str(digit) for digit in range(10))


def read_digits(data_dir: Path | None = None) -> TrainAndTest:
    """Return training and test pictures with their labels: a fixed stratified 70/30 split.

    They come with scikit-learn, so no data directory is looked at.
    """
    # scikit-learn takes most of a second to import, which other settings should not wait for.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pictures = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    train, test = train_test_split(
        np.arange(len(pictures)), test_size=0.3, stratify=digits.target, random_state=0
    )
    images, labels = torch.from_numpy(pictures), torch.from_numpy(digits.target.astype(np.int64))
    return images[train], labels[train], images[test], labels[test]
