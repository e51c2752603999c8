"""scikit-learn's handwritten digits."""

from dataclasses import dataclass

import numpy as np

from lineage.data.content import Arrays, Images
from lineage.data.sources.base import SOURCES, Source


@SOURCES.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """scikit-learn's 1,797 handwritten digits: gray images of 8x8 pixels, 1,438 for training and 359 for test.

    Every fifth example of each class is for test.
    """

    def images(self) -> Images:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # 17 gray levels
        order = np.argsort(labels, kind="stable")
        held_out = np.arange(len(order)) % 5 == 4
        splits = {
            name: Arrays({"image": images[np.sort(chosen)], "label": labels[np.sort(chosen)].astype(np.int32)})
            for name, chosen in (("train", order[~held_out]), ("test", order[held_out]))
        }
        return Images(splits, [str(digit) for digit in range(10)])
