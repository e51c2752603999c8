"""Decoded and augmented images per second of CPU time, compared with torchvision and timm on the same files.

python -m benchmarks.images --rounds=15
python -m benchmarks.images --randaugment --folder=PATH/TO/IMAGENET/train

All loaders read JPEG files in their own process with one thread, and apply the random resized crop, the flip and the
normalization of `resnet50_imagenet`, or with `--randaugment` also the RandAugment of `vit_s16_imagenet`. Their rounds
alternate; the medians are printed, with the median ratio of each loader to Lineage in the same round. Without a folder,
the files are 256 cutouts of scikit-learn's two photos with sides of 224 to 500 pixels, and a round is an epoch.
The benchmark needs torchvision and timm.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.timing import in_turns
from lineage.data import Images, Loader, TrainBatches
from lineage.data.sources.folder import SUFFIXES, ImageFiles
from lineage.tasks.image_classification import ImageClassification

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AREA = (0.05, 1.0)  # area of the random crop, relative to the image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of folders of images")
    parser.add_argument("--randaugment", action="store_true")
    parser.add_argument("--size", type=int, default=224, help="height and width of the crops")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=4, help="batches of each loader in a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or make_files(Path(made))
        loaders = {"lineage": ours(folder, options), "torchvision": torchvision(folder, options)}
        loaders["timm"] = timm(folder, options)
        ways = [partial(draw, batches, options) for batches in loaders.values()]
        times = in_turns(ways, options.rounds, time.process_time)
    speeds = np.median(options.batches * options.batch / times, axis=0)
    ratios = np.median(times[:, :1] / times, axis=0)
    for name, speed, ratio in zip(loaders, speeds, ratios):
        print(f"{name:12s} {speed:7.0f} images/s {ratio:6.2f} of Lineage")


def draw(batches: Iterator, options: argparse.Namespace) -> None:
    """Load the batches of a round."""
    for _ in range(options.batches):
        assert next(batches).shape[0] == options.batch


def make_files(folder: Path) -> Path:
    """Write 256 JPEG files of cutouts from two photos, in folders of two classes."""
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    for label, photo in enumerate(load_sample_images().images):
        (folder / str(label)).mkdir()
        for number in range(128):
            height, width = random.integers(224, [427, 501])
            top, left = (int(random.integers(whole - side + 1)) for whole, side in zip(photo.shape, (height, width)))
            part = Image.fromarray(photo[top : top + height, left : left + width])
            part.save(folder / str(label) / f"{number}.jpg", quality=int(random.integers(75, 96)))
    return folder


def ours(folder: Path, options: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yield the images of this project's training batches."""
    files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in SUFFIXES)
    source = ImageFiles(files, np.zeros(len(files), np.int32), 3)
    augment = f"crop({AREA[0]}, {AREA[1]}) | flip" + " | randaugment(2, 10)" * options.randaugment
    task = ImageClassification(image_size=options.size, mean=MEAN, std=STD, augment=augment)
    transform = task.examples(Images({"train": source}, ["0"]), None, 0).train_transform
    batches = TrainBatches(source=source, loader=Loader(batch_size=options.batch), transform=transform, seed=0)
    return (batch["image"] for batch in batches.iterate())


def endless(make: Callable[[], Iterator]) -> Iterator:
    """Yield the images of the batches of all epochs."""
    return (batch[0] for _ in itertools.count() for batch in make())


def torchvision(folder: Path, options: argparse.Namespace) -> Iterator:
    """Yield the images of torchvision's `ImageFolder` with its transforms and PyTorch's `DataLoader`."""
    import torch
    from torchvision import datasets, transforms

    torch.set_num_threads(1)
    crop = transforms.RandomResizedCrop(options.size, AREA)
    augment = [transforms.RandAugment(2, 10)] if options.randaugment else []
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    steps = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *augment, *last])
    data = datasets.ImageFolder(str(folder), steps)
    return endless(lambda: torch.utils.data.DataLoader(data, options.batch, shuffle=True, drop_last=True))


def timm(folder: Path, options: argparse.Namespace) -> Iterator:
    """Yield the images of timm's loader, which normalizes whole batches."""
    import torch
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", str(folder)),
        (3, options.size, options.size),
        options.batch,
        is_training=True,
        scale=AREA,
        color_jitter=None,
        auto_augment="rand-m10-n2" if options.randaugment else None,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    return endless(lambda: loader)


if __name__ == "__main__":
    main()
