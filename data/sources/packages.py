"""Data that come with Python packages: scikit-learn's handwritten digits, and dates in Babel's locales."""

import datetime
import zlib
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lineage.data.content import Arrays, Images, PairedTexts
from lineage.data.sources.base import SOURCES, SPLITS, Source

_DAYS = range(datetime.date(1950, 1, 1).toordinal(), datetime.date(2050, 1, 1).toordinal())
_LOCALES = ("en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "tr", "fi")
_FORMATS = ("full", "long", "medium", "d MMMM y", "MMMM d, y", "EEE d MMM y")


@SOURCES.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """scikit-learn's 1,797 handwritten digits: gray images of 8x8 pixels, 1,438 for training and 359 for test.

    Every fifth example of each class is for test.
    """

    def images(self) -> Images:
        (package,) = find_spec("sklearn").submodule_search_locations  # the package itself is slow to import
        rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
        pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
        images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # 17 gray levels
        order = np.argsort(labels, kind="stable")
        held_out = np.arange(len(order)) % 5 == 4
        splits = {
            name: Arrays({"image": images[np.sort(chosen)], "label": labels[np.sort(chosen)].astype(np.int32)})
            for name, chosen in (("train", order[~held_out]), ("test", order[held_out]))
        }
        return Images(splits, [str(digit) for digit in range(10)])


@SOURCES.register("cldr")
@dataclass(frozen=True)
class Dates(Source):
    """Dates in the formats of twelve locales of the Unicode CLDR (from Babel), with the same dates in ISO 8601.

    Every day of 1950 to 2049 occurs once, in a random locale and format; a tenth each is for validation and for test.

    Attributes:
        languages: whether the targets are the codes of the languages, such as "de", instead of the dates.
    """

    languages: bool = False

    def files(self) -> list[str]:
        root = resources.files("babel")
        locales = ("root", "en_001", *_LOCALES)
        return [str(root / "dates.py"), *(str(root / "locale-data" / f"{locale}.dat") for locale in locales)]

    def pairs(self) -> dict[str, PairedTexts]:
        from babel.dates import format_date

        splits = {split: PairedTexts([], []) for split in SPLITS}
        for ordinal in _DAYS:
            day = datetime.date.fromordinal(ordinal)
            draw = zlib.crc32(str(ordinal).encode())
            locale, form = _LOCALES[draw % len(_LOCALES)], _FORMATS[draw // 64 % len(_FORMATS)]
            inputs, targets = splits[{8: "validation", 9: "test"}.get(draw // 4096 % 10, "train")]
            inputs.append(format_date(day, form, locale))
            targets.append(locale[:2] if self.languages else day.isoformat())
        return splits
