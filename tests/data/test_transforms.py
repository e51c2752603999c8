import io
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from lineage.data import shuffle
from lineage.data.transforms import augmentation, distortions
from lineage.data.transforms.augmentation import CenterCrop, Erase, Flip, RandomCrop, Shift, Transform, parse
from lineage.data.transforms.distortions import INCREASING, OPERATIONS, Jitter, RandAugment
from lineage.data.transforms.pillow import Picture, crop, decode, opened, to_pillow

RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (16, 20, 24, 3)).astype(np.uint8)
GRAY = RANDOM.integers(0, 256, (16, 20, 24, 1)).astype(np.uint8)
KEYS = shuffle.keys(np.arange(16), 0)
ALL = {
    "crop": RandomCrop(12),
    "center": CenterCrop(12, 0.875),
    "flip": Flip(),
    "shift": Shift(3),
    "randaugment": RandAugment(2, 9),
    "deit": RandAugment(2, 9, deviation=0.5, probability=0.5, increasing=True),
    "jitter": Jitter(0.4, 0.4, 0.4, 0.1),
    "erase": Erase(0.9),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("images", [RGB, GRAY], ids=["rgb", "gray"])
def test_images_depend_on_their_own_key_only(name, images):
    before = images.copy()
    images = images.astype(np.float32) if name == "erase" else images
    together = ALL[name](images, KEYS)
    alone = np.concatenate([ALL[name](images[i : i + 1], KEYS[i : i + 1]) for i in range(16)])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, ALL[name](images, KEYS))
    assert together.dtype == images.dtype
    assert together.shape == (16, 12, 12, images.shape[-1]) if name in ("crop", "center") else images.shape
    np.testing.assert_array_equal(images, before)
    if name != "center":
        assert (together != ALL[name](images, shuffle.keys(np.arange(16), 1))).any()


def test_flip():
    keys = shuffle.keys(np.arange(10_000), 0)
    pixels = np.zeros((10_000, 1, 2, 1), np.uint8)
    pixels[:, :, 1] = 1
    flipped = Flip()(pixels, keys)[:, 0, 0, 0]
    assert flipped.mean() == pytest.approx(0.5, abs=0.02)
    np.testing.assert_array_equal(Flip()(pixels, keys)[:, 0, 1, 0], 1 - flipped)


def test_shift():
    keys = shuffle.keys(np.arange(5000), 0)
    pixels = np.zeros((5000, 7, 7, 1), np.uint8)
    pixels[:, 3, 3] = 9
    moved = Shift(2)(pixels, keys)
    _, rows, columns, _ = np.nonzero(moved)
    assert len(rows) == 5000
    counts = np.bincount((rows - 1) * 5 + columns - 1, minlength=25)
    assert counts.min() > 130  # 200 expected for each of the 25 shifts
    assert len(counts) == 25
    np.testing.assert_array_equal(Shift(0)(RGB, KEYS), RGB)
    edges = Shift(2)(np.ones((100, 4, 4, 1), np.uint8), keys[:100])
    assert {int(image.sum()) for image in edges} == {a * b for a in (2, 3, 4) for b in (2, 3, 4)}


def test_crops_match_pillow_resize():
    image = RGB[0]
    for name, kind in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        expected = np.asarray(Image.fromarray(image).resize((19, 16), kind))[1:15, 2:16]
        np.testing.assert_array_equal(CenterCrop(14, 0.875, name)([image], KEYS[:1])[0], expected)
        top, left, height, width = RandomCrop(9).box(20, 24, shuffle.generator(KEYS[0]))
        part = Image.fromarray(image[top : top + height, left : left + width])
        (crop,) = parse("crop", 9, name)
        np.testing.assert_array_equal(crop([image], KEYS[:1])[0], np.asarray(part.resize((9, 9), kind)))
    np.testing.assert_array_equal(CenterCrop(20)([image], KEYS[:1])[0], image[:, 2:22])
    tall = np.swapaxes(image, 0, 1)
    np.testing.assert_array_equal(CenterCrop(20)([tall], KEYS[:1])[0], tall[2:22])
    assert CenterCrop(40)([image, tall, GRAY[0].repeat(3, -1)], KEYS[:3]).shape == (3, 40, 40, 3)
    assert CenterCrop(224, 0.875)._one(np.zeros((300, 500, 3), np.uint8)).shape == (224, 224, 3)


@pytest.mark.parametrize("shape", [(2, 300), (300, 2)])
def test_crops_of_elongated_images(shape, monkeypatch):
    """Check that the crop is that of the whole resized image, which is not computed: it could need a lot of memory."""
    image = np.random.default_rng(0).integers(256, size=(*shape, 3), dtype=np.uint8)
    crop = CenterCrop(14, 0.875)
    actual = crop([image], KEYS[:1])[0].astype(int)
    monkeypatch.setattr(augmentation, "ELONGATED", 1000)
    assert np.abs(actual - crop([image], KEYS[:1])[0]).max() <= 1
    monkeypatch.undo()
    assert crop([np.zeros((1, 3_000_000, 1), np.uint8)], KEYS[:1]).shape == (1, 14, 14, 1)


def encoded(pixels, kind="JPEG"):
    file = io.BytesIO()
    to_pillow(pixels).save(file, kind, quality=95)
    return file.getvalue()


@pytest.fixture(scope="module")
def photo():
    return load_sample_images().images[0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_crops_of_files_equal_those_of_arrays(photo, kind, channels):
    file = encoded(photo[:120, :200, :channels], kind)
    picture, whole = Picture(file, channels), decode(file, channels)
    assert picture.shape == whole.shape == (120, 200, channels)
    np.testing.assert_array_equal(np.asarray(picture), whole)
    for transform in (RandomCrop(70), CenterCrop(50, 0.875), CenterCrop(120), RandomCrop(64, resample="bicubic")):
        for key in KEYS[:, None]:
            np.testing.assert_array_equal(transform([picture], key), transform([whole], key))


def test_large_crops_of_jpeg_files_are_decoded_at_a_reduced_size(photo):
    file = encoded(photo)
    for size, box, scale in ((100, (0, 5, 427, 460), 4), (100, (0, 100, 427, 205), 2), (60, (7, 0, 420, 640), 4)):
        with opened(Picture(file, 3)) as image:
            actual = np.asarray(crop(image, box, size, Image.Resampling.BILINEAR)).astype(int)
            assert image.size == (-(-640 // scale), -(-427 // scale))
        top, left, height, width = box
        part = to_pillow(decode(file, 3)[top : top + height, left : left + width])
        expected = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR))
        assert abs(actual - expected).mean() < 3
        assert abs(np.roll(actual, 1, 1) - expected).mean() > 4  # of a shift by one pixel
    with opened(Picture(file, 3)) as image:
        crop(image, (0, 0, 427, 199), 100, Image.Resampling.BILINEAR)
        assert image.size == (640, 427)


def test_random_crop():
    crop = RandomCrop(8, 0.2, 0.6)
    boxes = [crop.box(100, 150, shuffle.generator(key)) for key in shuffle.keys(np.arange(2000), 0)]
    top, left, height, width = np.array(boxes).T
    area, aspect = height * width / 15_000, width / height
    assert 0.19 < area.min() < 0.22
    assert 0.58 < area.max() < 0.61
    assert area.mean() == pytest.approx(0.4, abs=0.02)
    assert 0.73 < aspect.min() < 0.77
    assert 1.31 < aspect.max() < 1.36
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 100).all()
    assert (left + width <= 150).all()
    assert (top == 0).any()
    assert (top + height == 100)[height < 90].any()
    # The whole image if no crop fits.
    assert RandomCrop(8, 0.9, 1).box(2, 1000, shuffle.generator(KEYS[0])) == (0, 0, 2, 1000)
    np.testing.assert_array_equal(RandomCrop(20, 1, 1, 1)(RGB[:1, :, :20], KEYS[:1]), RGB[:1, :, :20])


def test_randaugment_draws_all_operations():
    seen = []
    originals = dict(OPERATIONS)

    def recorded(name, *arguments):
        seen.append(name)
        return originals[name](*arguments)

    try:
        OPERATIONS.update({name: partial(recorded, name) for name in originals})
        RandAugment(3, 10)(np.repeat(GRAY, 20, 0), shuffle.keys(np.arange(320), 0))
    finally:
        OPERATIONS.update(originals)
    assert len(seen) == 960
    counts = {name: seen.count(name) for name in originals}
    assert min(counts.values()) > 30  # 60 expected
    np.testing.assert_array_equal(RandAugment(0, 10)(RGB, KEYS), RGB)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strength", [0, 0.5, 1])
def test_operations_keep_size_and_mode(name, mode, strength):
    image = Image.fromarray(RGB[0]).convert(mode)
    before = image.tobytes()
    for operations in (OPERATIONS, INCREASING):
        if name in operations:
            result = operations[name](image, strength, shuffle.generator(KEYS[0]))
            assert (result.size, result.mode) == (image.size, mode)
            assert image.tobytes() == before


@pytest.mark.parametrize("name", ["autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add"])
def test_operations_on_colors_leave_alpha_unchanged(name):
    alpha = np.arange(RGB[0, :, :, 0].size, dtype=np.uint8).reshape(RGB[0, :, :, 0].shape)
    image = Image.fromarray(np.dstack([RGB[0], alpha]))
    for operations in (OPERATIONS, INCREASING):
        result = np.asarray(operations[name](image, 0.6, shuffle.generator(KEYS[0])))
        colors = operations[name](Image.fromarray(RGB[0]), 0.6, shuffle.generator(KEYS[0]))
        np.testing.assert_array_equal(result, np.dstack([np.asarray(colors), alpha]))


def test_jitter_turns_the_hue_of_images_with_alpha():
    alpha = np.full((*RGB.shape[:3], 1), 7, np.uint8)
    jitter = Jitter(0, 0, 0, 0.5)
    turned = jitter(np.concatenate([RGB, alpha], axis=-1), KEYS)
    np.testing.assert_array_equal(turned, np.concatenate([jitter(RGB, KEYS), alpha], axis=-1))


def apply(name, pixels, strength, operations=OPERATIONS):
    image = Image.fromarray(np.array(pixels, np.uint8))
    results = {np.asarray(operations[name](image, strength, shuffle.generator(key))).tobytes() for key in KEYS}
    return [np.frombuffer(result, np.uint8).reshape(np.shape(pixels)).tolist() for result in sorted(results)]


def test_operations():
    ramp = [[0, 100, 127, 128, 200, 255]]
    assert apply("invert", ramp, 1) == [[[255, 155, 128, 127, 55, 0]]]
    assert apply("posterize", ramp, 1) == [[[0, 96, 112, 128, 192, 240]]]
    assert apply("posterize", ramp, 0.5) == [[[0, 64, 64, 128, 192, 192]]]
    assert apply("posterize", ramp, 0) == [[[0] * 6]]
    assert apply("solarize", ramp, 0.5) == [[[0, 100, 127, 127, 55, 0]]]
    assert apply("solarize", ramp, 1) == [ramp]
    assert apply("solarize_add", ramp, 1) == [[[110, 210, 237, 128, 200, 255]]]
    assert apply("brightness", ramp, 0.5) == [ramp]
    assert apply("brightness", ramp, 1) == [[[0, 190, 241, 243, 255, 255]]]
    assert apply("autocontrast", [[50, 100, 150]], 1) == [[[0, 127, 255]]]
    # The shift is one pixel (0.75 * 100 / 224 of 3), in either direction; new pixels are gray.
    assert sorted(apply("translate_x", [[1, 2, 3]], 0.75)) == [[[2, 3, 128]], [[128, 1, 2]]]
    assert sorted(apply("translate_y", [[1], [2], [3]], 0.75)) == [[[2], [3], [128]], [[128], [1], [2]]]
    board = np.arange(100).reshape(10, 10).tolist()
    for name in ("rotate", "shear_x", "shear_y"):
        assert apply(name, board, 0) == [board]
        assert len(apply(name, board, 1)) == 2
    for name, place in (("shear_x", np.arange(100) // 10), ("shear_y", np.arange(100) % 10)):
        for moved in np.array(apply(name, board, 1)):  # along rows, or along columns
            kept = (place[np.minimum(moved, 99)] == place.reshape(10, 10)) | (moved == 128)
            assert kept.all()
            assert (moved == 128).any()
    assert max(np.sum(np.array(part) == 128) for part in apply("cutout", np.zeros((28, 28)), 0.5)) == 16
    assert all(np.sum(np.array(part) == 128) >= 1 for part in apply("cutout", np.zeros((28, 28)), 0.5))


def test_randaugment_of_deit(monkeypatch):
    seen = []
    for name in INCREASING:
        monkeypatch.setitem(INCREASING, name, lambda image, s, random, name=name: (seen.append((name, s)), image)[1])
    RandAugment(3, 9, 0.5, 0.5, True)(np.repeat(GRAY, 20, 0), shuffle.keys(np.arange(320), 0))
    assert 400 < len(seen) < 560  # half of 960
    assert {name for name, _ in seen} == OPERATIONS.keys() - {"cutout"}  # timm has random erasing instead
    strengths = np.array([strength for _, strength in seen])
    assert 0.87 < strengths.mean() < 0.93
    assert 0.03 < strengths.std() < 0.07
    assert strengths.max() == 1  # larger strengths are clipped


def test_operations_of_timm():
    """Check what differs from `OPERATIONS`: all strengthen, and lengths, interpolation and colors."""
    ramp = [np.arange(256).tolist()]
    assert apply("posterize", ramp, 0.9, INCREASING) == [[[value & 128 for value in range(256)]]]  # one bit is kept
    for strength in (0, 0.13, 0.5, 0.9, 1):
        (solarized,) = np.array(apply("solarize", ramp, strength, INCREASING))
        np.testing.assert_array_equal(solarized[0] != ramp[0], np.arange(256) >= 256 - int(256 * strength))
    assert apply("brightness", [[100]], 0.5, INCREASING) == [[[55]], [[145]]]  # factors 1 - 0.45 and 1 + 0.45
    assert apply("brightness", [[100]], 1, INCREASING) == [[[10]], [[190]]]
    photo = np.full((20, 20, 3), 250, np.uint8)
    right, left = np.array(apply("translate_x", photo, 1, INCREASING))  # by 9 of 20 pixels
    for moved, outside in ((left, np.s_[:, -9:]), (right, np.s_[:, :9])):
        assert (moved[outside] == (124, 116, 104)).all()
        assert np.count_nonzero((moved == 250).all(-1)) == 20 * 11
    edge = [[0, 0, 0, 0, 200, 200, 200, 200]] * 8
    values = {
        *np.ravel(apply("translate_x", edge, 0.4, INCREASING))
    }  # by 1.44 pixels, which bicubic interpolation keeps
    assert values - {0, 128, 200}


def test_jitter_steps_are_in_random_order(monkeypatch):
    orders = []
    for name in ("Brightness", "Contrast", "Color"):

        def enhancer(image, name=name):
            orders[-1] += name[:3]
            return SimpleNamespace(enhance=lambda factor: image)

        monkeypatch.setattr(distortions.ImageEnhance, name, enhancer)
    for key in shuffle.keys(np.arange(60), 0):
        orders.append("")
        Jitter()(RGB[:1], key[None])
    assert len(set(orders)) == 6


def test_jitter():
    image = np.full((400, 2, 2, 3), (150, 100, 50), np.uint8)
    keys = shuffle.keys(np.arange(400), 0)
    luminance = [0.299, 0.587, 0.114]
    bright = Jitter(0.4, 0, 0)(image, keys)[:, 0, 0, 0] / 150
    assert bright.min() == pytest.approx(0.6, abs=0.02)
    assert bright.max() == pytest.approx(1.4, abs=0.02)
    assert bright.mean() == pytest.approx(1, abs=0.03)
    assert np.mean(Jitter(3, 0, 0)(image, keys)[:, 0, 0, 0] == 0) < 0.02  # the factor is uniform from 0 to 4
    faded = Jitter(0, 0, 0.8)(image, keys)[:, 0, 0]  # saturation changes, luminance does not
    assert np.abs((faded - image[:, 0, 0].astype(float)) @ luminance).max() < 2
    spread = np.ptp(faded, axis=-1) / 100
    assert (spread.min() < 0.25, spread.max() > 1.7) == (True, True)
    board = np.tile(np.array([60, 140], np.uint8).reshape(1, 1, 2, 1), (400, 2, 1, 3))
    contrast = np.ptp(Jitter(0, 0.5, 0)(board, keys).astype(int), axis=(1, 2, 3)) / 80
    assert (contrast.min() < 0.55, contrast.max() > 1.45) == (True, True)
    # A rotation of the hue by a third of the circle turns red into green or blue.
    red = np.full((400, 1, 1, 3), (255, 0, 0), np.uint8)
    turned = Jitter(0, 0, 0, 0.5)(red, keys)[:, 0, 0]
    assert {tuple(np.rint(pixel / 255).astype(int)) for pixel in turned} >= {(1, 0, 0), (0, 1, 0), (0, 0, 1)}
    assert (turned.max(-1) >= 250).all()
    np.testing.assert_array_equal(Jitter(0, 0, 0)(RGB, KEYS), RGB)


def test_erase():
    keys = shuffle.keys(np.arange(3000), 0)
    images = np.full((3000, 24, 20, 3), 7, np.float32)
    erased = Erase(0.4)(images, keys)
    changed = (erased != 7).all(-1)
    assert ((erased != 7).any(-1) == changed).all()  # all channels of a pixel
    touched = changed.any((1, 2))
    assert touched.mean() == pytest.approx(0.4, abs=0.03)
    area, height, width = changed.sum((1, 2))[touched], changed.any(2).sum(1)[touched], changed.any(1).sum(1)[touched]
    np.testing.assert_array_equal(area, height * width)  # a box
    assert (area / 480).min() < 0.03
    assert 0.3 < (area / 480).max() < 0.36
    assert 0.27 < (height / width)[area > 80].min() < 0.35
    noise = erased[changed]
    assert (abs(noise.mean()), abs(noise.std() - 1)) < (0.02, 0.02)
    # The noise is added after normalization, and only in training.
    transform = Transform(None, [Flip()], (0.5,), (0.5,), Erase(1.0))
    pixels = transform({"image": np.zeros((50, 24, 20, 1), np.uint8)}, KEYS[:1].repeat(50))["image"]
    assert (pixels != -1).any((1, 2, 3)).all()
    assert pixels.dtype == np.float32


def test_parse():
    assert parse("crop | flip|randaugment(2, 10)", 224) == [RandomCrop(224), Flip(), RandAugment(2, 10)]
    assert parse("crop(0.3, 0.9)", 32) == [RandomCrop(32, 0.3, 0.9)]
    deit = parse("crop(0.08) | randaugment(2, 9, deviation=0.5, increasing=True) | erase(0.25)", 32, "bicubic")
    assert deit == [
        RandomCrop(32, 0.08, resample="bicubic"),
        RandAugment(2, 9, deviation=0.5, increasing=True),
        Erase(0.25),
    ]
    assert parse("jitter(0.3, hue=0.1)") == [Jitter(0.3, 0.4, 0.4, 0.1)]
    assert parse("shift(1)") == [Shift(1)]
    assert parse("") == []


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("flop", r"'flop' is not one of crop\(min_area, max_area, max_aspect, resample\), flip, randaugment\(layers,"),
        *((text, "is not one of") for text in ("flip(1)", "shift(1", "1 + 1", "__import__('os')", "shift(2, pixel=3)")),
        ("shift()", "'shift()' is not one of"),
        ("shift(a)", r"'shift\(a\)' is not one of"),
        ("shift(pixels=a)", r"'shift\(pixels=a\)' is not one of"),
        ("shift('a')", "Shift.pixels is 'a': it must be an integer"),
        ("randaugment(2, 11)", r"RandAugment.magnitude is 11: it must be 0 or more and at most 10"),
        ("crop(0)", r"RandomCrop.min_area is 0: it must be above 0 and at most 1"),
        ("crop(0.5, 0.2)", r"min_area is 0.5: it must be at most max_area, which is 0.2"),
        ("flip | crop", "crop must come first"),
        ("erase | flip", "erase must come last"),
        ("erase(2)", r"Erase.probability is 2: it must be 0 or more and at most 1"),
        ("crop(0.1, resample='nearest')", "task.resample is 'nearest': it must be bilinear or bicubic"),
        ("randaugment(2, 9, -1)", r"RandAugment.deviation is -1: it must be 0 or more"),
        ("jitter(0.4, hue=0.7)", r"Jitter.hue is 0.7: it must be 0 or more and at most 0.5"),
    ],
)
def test_invalid_transforms_raise(augment, message):
    with pytest.raises(ValueError, match=message.replace("()", r"\(\)")):
        parse(augment, 8)


def test_crop_without_size_raises():
    with pytest.raises(ValueError, match=r"crop needs task.image_size"):
        parse("crop")


def test_transform():
    transform = Transform(None, [], (0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    result = transform({"image": RGB, "label": np.arange(16)}, KEYS)
    expected = (RGB / 255 - [0.5, 0.25, 0]) / [0.5, 1, 2]
    assert result["image"].dtype == np.float32
    np.testing.assert_allclose(result["image"], expected, atol=1e-6)
    assert result["label"].tolist() == list(range(16))


def test_steps_have_independent_randomness():
    pixels = np.zeros((500, 9, 9, 1), np.uint8)
    pixels[:, 4, 4] = 1
    keys = shuffle.keys(np.arange(500), 0)
    twice = Transform(None, [Shift(1), Shift(1)], (0.0,), (1.0,))({"image": pixels}, keys)["image"]
    _, rows, _, _ = np.nonzero(twice)
    # With the same random numbers, no image would have moved by one pixel.
    assert set(rows.tolist()) == {2, 3, 4, 5, 6}
