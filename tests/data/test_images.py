"""Image sets: readers on small files of the same format, folders, crops, splits, p_X."""

from __future__ import annotations

import gzip
import hashlib
import json
import shlex
import shutil
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fsmap.cli import main
from fsmap.data import catalogue
from fsmap.data import images as module
from fsmap.data.catalogue import DataFile
from fsmap.data.images import (
    Augmentation,
    Normalization,
    Shifts,
    load_task,
    noisy_labels,
    parse,
    read_folder,
    read_images,
    read_others,
    tiles,
    white_noise,
)
from fsmap.errors import InputError, MissingDataError
from fsmap.images import load_model

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with small sets, and a catalogue that knows their checksums."""
    content: dict[str, bytes] = {}
    for name in ("fashion-mnist", "kmnist"):
        for split, n in (("train", 6), ("t10k", 4)):
            x = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
            y = np.arange(n, dtype=np.uint8)
            content[f"{name}/{split}-images-idx3-ubyte.gz"] = gzip.compress(idx(x))
            content[f"{name}/{split}-labels-idx1-ubyte.gz"] = gzip.compress(idx(y))
    pixels = RNG.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels.reshape(4, 1024, 3)).save(tmp_path / "p.png")
    for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        content[f"cifar10/{batch}.png"] = (tmp_path / "p.png").read_bytes()
    content["cifar10/train_lables.json"] = json.dumps([*range(10)] * 2).encode()
    content["cifar10/test_lables.json"] = b"[3, 1, 4, 1]"
    mosaic = pixels.reshape(2, 2, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 64, 3)
    Image.fromarray(mosaic).save(tmp_path / "m.webp", lossless=True)
    for i in range(6):
        content[f"cifar100/images_{i}.webp"] = (tmp_path / "m.webp").read_bytes()
    content["cifar100/labels_fine.bin"] = bytes(range(24))
    np.save(tmp_path / "x.npy", pixels)
    np.save(tmp_path / "y.npy", np.array([0, 1, 2, 9], dtype=np.int32))
    content["cifar10.1/cifar10.1_v6_data.npy"] = (tmp_path / "x.npy").read_bytes()
    content["cifar10.1/cifar10.1_v6_labels.npy"] = (tmp_path / "y.npy").read_bytes()
    root = tmp_path / "data"
    for path, raw in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(raw)
    known = small(content)
    monkeypatch.setattr(catalogue, "catalogue", lambda: known)
    return root


def small(content: dict[str, bytes]) -> dict[str, catalogue.DataSet]:
    """The catalogue with the checksums of these files."""
    known = {}
    for name, entry in catalogue.catalogue().items():
        files = []
        for file in entry.files:
            raw = content.get(file.path, b"")
            inside = gzip.decompress(raw) if file.content and raw else raw
            digest = hashlib.sha256(inside).hexdigest()
            files.append(DataFile(file.path, digest, len(inside), file.content))
        known[name] = entry._replace(files=tuple(files))
    return known


@pytest.mark.parametrize(
    ("name", "split", "shape"),
    [
        *(("fmnist", "train", (6, 1, 28, 28)), ("kmnist", "test", (4, 1, 28, 28))),
        *(("kmnist-train", "train", (6, 1, 28, 28)), ("cifar10", "train", (20, 3, 32, 32))),
        *(("cifar10", "test", (4, 3, 32, 32)), ("cifar100", "all", (24, 3, 32, 32))),
        ("cifar10.1", "test", (4, 3, 32, 32)),
    ],
)
def test_every_format_is_read(folder: Path, name: str, split: str, shape: tuple[int, ...]):
    images = read_images(name, split, folder)
    assert (tuple(images.x.shape), len(images.y)) == (shape, shape[0])
    assert (images.x.dtype, images.y.dtype) == (torch.uint8, torch.int64)


def test_pixels_are_where_they_belong(folder: Path):
    """PNG rows, tiles of a mosaic and arrays hold the same four images here."""
    rows = read_images("cifar10", "test", folder)
    assert rows.y.tolist() == [3, 1, 4, 1]
    assert torch.equal(rows.x, read_images("cifar100", "all", folder).x[:4])
    assert torch.equal(rows.x, read_images("cifar10.1", "test", folder).x)
    cut = tiles(np.arange(64 * 64 * 3).reshape(64, 64, 3))
    assert cut[1, 0, 0, 0] == 32 * 3  # the second tile is right of the first
    assert cut[2, 0, 0, 0] == 32 * 64 * 3


@pytest.mark.parametrize(
    ("name", "split", "word"),
    [("boston", "train", "boston"), ("cifar", "train", "cifar10"), ("cifar100", "valid", "splits")],
)
def test_sets_and_splits_that_are_not_there(folder: Path, name: str, split: str, word: str):
    with pytest.raises(InputError, match=word):
        read_images(name, split, folder)
    for px_name in ("digits", "whitenoise"):
        with pytest.raises(InputError, match=px_name):
            load_task("fmnist", px=px_name, limit=8, data_dir=folder)
    with pytest.raises(InputError, match="cannot"):
        load_task("kmnist")


def test_normalization():
    normalize = Normalization((0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    x = normalize(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), torch.float64)
    assert torch.allclose(x[0, :, 0, 0], torch.tensor([1.0, 3.0, 1.0]))


def test_crops_and_flips_are_those_of_a_loop():
    images = torch.randint(256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    down, right, flip = torch.tensor([[0, 4, 8, 2, 4], [4, 0, 8, 4, 4], [0, 1, 0, 1, 0]])
    shifts = Shifts(down, right, flip.bool())
    found = Augmentation().apply(images, shifts)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    for k in range(5):
        i, j = int(shifts.down[k]), int(shifts.right[k])
        crop = padded[k, :, i : i + 8, j : j + 8]
        assert torch.equal(found[k], crop.flip(-1) if shifts.flip[k] else crop)
    assert torch.equal(found[4], images[4])


def test_draws_are_a_function_of_their_generator():
    generators = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    one, two, other = (Augmentation().draw((4000,), generator) for generator in generators)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one.down, other.down)
    assert sorted(set(one.down.tolist())) == list(range(9))
    assert abs(one.flip.double().mean() - 0.5) < 0.05


def test_label_noise_draws_round_of_the_fraction_anew():
    """With one wrong class to draw from, each chosen label changes: which, and how many, shows."""
    y = torch.zeros(1000, dtype=torch.int64)

    def chosen(fraction: float, seed: int = 0) -> set[int]:
        # 2**40 classes: a label that is drawn anew is never the old one by chance
        return set(noisy_labels(y, fraction, 2**40, seed).nonzero().flatten().tolist())

    assert noisy_labels(y, 0.0, 10, 0) is y
    assert [len(chosen(f)) for f in (0.1, 0.2004, 0.6, 1.0)] == [100, 200, 600, 1000]
    assert chosen(0.1) < chosen(0.2) < chosen(0.6)
    assert chosen(0.2) != chosen(0.2, seed=1) != set(range(200))
    few, more = (noisy_labels(y, f, 10, 0) for f in (0.2, 0.6))
    assert torch.equal(more[few != 0], few[few != 0])
    assert set(more.tolist()) == set(range(10))
    counts = torch.bincount(noisy_labels(y, 1.0, 10, 0))
    assert (counts - 100).abs().max() < 40  # four standard deviations; the old label included


def test_the_split_belongs_to_its_seed():
    task = partial(load_task, "fmnist", generated=True)
    one, two, other = (task(valid=100, split_seed=seed) for seed in (0, 0, 1))
    assert (len(one.valid.x), len(one.train.x)) == (100, 1900)
    assert torch.equal(one.valid.x, two.valid.x)
    assert not torch.equal(one.valid.x, other.valid.x)
    noisy = task(valid=100, label_noise=0.5)
    assert torch.equal(noisy.valid.y, one.valid.y)
    assert (noisy.train.y != one.train.y).double().mean() > 0.4
    assert len(task(limit=50).train.x) == 50


def test_the_protocol(folder: Path):
    found = load_task("cifar10", px="cifar100", data_dir=folder, valid=2)
    assert found.augment is not None
    assert found.px.sources[0].augmented
    assert found.shape == (3, 32, 32)
    assert load_task("fmnist", data_dir=folder, valid=1).augment is None
    prints = found.fingerprint()
    assert prints == load_task("cifar10", px="cifar100", data_dir=folder, valid=2).fingerprint()
    assert prints != load_task("cifar10", px="cifar100", data_dir=folder, valid=3).fingerprint()
    with pytest.raises(InputError, match=r"'kmnist' has images of shape \(1, 28, 28\)"):
        load_task("cifar10", px="kmnist", data_dir=folder, valid=2)


def test_mixtures():
    found = load_task("fmnist", generated=True, px="3*train+white-noise").px
    picks = found.draw((4000,), torch.Generator().manual_seed(0))
    assert abs((picks.component == 0).double().mean() - 0.75) < 0.03
    x = found.take(picks, torch.float64)
    train, noise = found.sources
    for k in range(50):
        if picks.component[k] == 0:
            expected = found.normalize(train.images[picks.row[k]][None], torch.float64)[0]
        else:
            expected = noise.images[picks.row[k]].double()
        assert torch.equal(x[k], expected)
    eight = found.draw((8,), torch.Generator().manual_seed(0))
    drawn = found.sample(8, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, found.take(eight, torch.float64))
    for text in ("", "train+", "0*train", "x*train", "-1*train"):
        with pytest.raises(InputError, match="component"):
            parse(text)


def test_white_noise_is_fixed():
    one, two = white_noise((1, 28, 28), 100), white_noise((1, 28, 28), 100)
    assert torch.equal(one, two)
    assert abs(one.std() - 1) < 0.01
    found = load_task("fmnist", generated=True, px="white-noise").px.sources[0]
    assert len(found.images) == 10_000


def test_cifar100_is_split_in_file_order(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The first images are test, the next held out, the rest training, whatever the seed."""
    monkeypatch.setattr(module, "CIFAR100_TEST", 10)
    facts = module.SETS["cifar100"]._replace(valid=5)
    monkeypatch.setitem(module.SETS, "cifar100", facts)
    whole = read_images("cifar100", "all", folder)
    for seed in (0, 3):
        found = load_task("cifar100", px="cifar100+train", split_seed=seed, data_dir=folder)
        for part, rows in (("test", slice(10)), ("valid", slice(10, 15)), ("train", slice(15, 24))):
            assert getattr(found, part).y.tolist() == whole.y[rows].tolist()
            assert torch.equal(getattr(found, part).x, whole.x[rows])
    assert found.classes == 100
    assert [len(source.images) for source in found.px.sources] == [24, 9]


def photos_in(folder: Path, *, mode="RGB", sizes=(12,), number=9) -> Path:
    rng = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(number):
            size = sizes[i % len(sizes)]
            shape = (size, size, 3) if mode == "RGB" else (size, size)
            pixels = rng.integers(100 * label, 100 * label + 60, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_one_image_in_six_is_test(tmp_path: Path):
    found = read_folder(str(photos_in(tmp_path / "photos")))
    assert found.classes == ("cat", "dog")
    assert (len(found.train.x), len(found.test.x)) == (15, 3)
    assert all((x.float().mean() > 90) == bool(y) for x, y in zip(*found.train, strict=True))
    own = load_task(f"{tmp_path}/photos", px="train", valid=3)
    assert (len(own.train.x), len(own.valid.x), own.classes) == (12, 3, 2)
    x = own.normalize(found.train.x)
    assert x.mean().abs() < 0.1
    assert (x.std() - 1).abs() < 0.1
    few = load_task(f"{tmp_path}/photos", limit=5)  # the first images are of all classes
    assert set(few.train.y.tolist()) == set(own.train.y[:5].tolist()) == {0, 1}
    for file in list((tmp_path / "photos" / "cat").iterdir())[1:]:
        file.unlink()
    read_folder.cache_clear()
    for seed in range(20):  # the only cat is for training
        assert 0 in load_task(f"{tmp_path}/photos", valid=1, split_seed=seed).train.y


def test_own_test_images_grey_and_sizes(tmp_path: Path):
    photos_in(tmp_path / "train", mode="L", sizes=(12, 16))
    photos_in(tmp_path / "test", mode="L", number=2)
    with pytest.raises(InputError, match="2 different sizes .12×12, 16×16"):
        read_folder(str(tmp_path))
    found = read_folder(f"{tmp_path}?size=8")
    assert found.train.x.shape == (18, 1, 8, 8)
    assert len(found.test.x) == 4
    assert set(found.test.y[:2].tolist()) == {0, 1}


@pytest.mark.parametrize(("sizes", "size"), [((5, 6), 8), ((20, 30, 31), 24), ((90, 300), 64)])
def test_images_of_different_sizes_have_an_option_to_paste(tmp_path, sizes, size):
    photos = photos_in(tmp_path / "my photos", sizes=sizes)
    with pytest.raises(InputError, match=r"--data '[^']*my photos\?size=\d+'") as raised:
        read_folder(str(photos))
    (words,) = shlex.split(str(raised.value).partition("--data ")[2])
    assert words == f"{photos}?size={size}"
    assert read_folder(words).train.x.shape[-2:] == (size, size)
    with pytest.raises(InputError, match=r"squares, write '"):  # of p_X: another option
        read_others(str(photos), (3, size, size))


def test_a_folder_with_the_name_of_a_set_does_not_hide_it(tmp_path, monkeypatch):
    photos_in(tmp_path / "fmnist")
    monkeypatch.chdir(tmp_path)
    assert [load_task(name, generated=True).classes for name in ("fmnist", "./fmnist")] == [10, 2]


def test_16_bits_and_orientation(tmp_path: Path):
    for name, bits in (("a", np.uint16), ("b", np.uint8)):  # as a camera writes them: rotated
        shades = np.arange(4, dtype=bits).reshape(2, 2).repeat(4, 0).repeat(4, 1)
        picture = Image.fromarray(shades * (64 * 2 ** (shades.itemsize * 8 - 8)))
        exif = Image.Exif()
        exif[0x0112] = 6
        (tmp_path / name).mkdir()
        picture.save(tmp_path / name / "0.png", exif=exif)
    images = torch.cat([part.x for part in read_folder(str(tmp_path))[:2]])
    assert images[:, 0, ::4, ::4].tolist() == [[[128, 0], [192, 64]]] * 2
    Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(tmp_path / "a" / "f.tif")
    with pytest.raises(InputError, match="32 bits"):
        read_folder(f"{tmp_path}?size=8")


def test_hidden_files_are_no_images_and_links_are_classes(tmp_path: Path):
    photos = photos_in(tmp_path / "photos")
    (photos / "cat" / ".ipynb_checkpoints").mkdir()
    shutil.copy(photos / "cat" / "0.png", photos / "cat" / ".ipynb_checkpoints")
    (photos / "cat" / "._0.png").write_bytes(b"of another system")
    photos_in(tmp_path / "more", number=3)
    (photos / "eel").symlink_to(tmp_path / "more" / "cat")
    found = read_folder(str(photos))
    assert found.classes == ("cat", "dog", "eel")
    assert torch.cat([part.y for part in found[:2]]).bincount().tolist() == [9, 9, 3]


def test_a_folder_is_p_x_and_another_test_set(tmp_path: Path):
    photos = str(photos_in(tmp_path / "photos"))
    (tmp_path / "more").mkdir()
    (photos_in(tmp_path / "own", number=5) / "dog").rename(tmp_path / "more" / "unlabelled")
    px = load_task(photos, px=f"train+3*{tmp_path}/more").px
    assert [len(source.images) for source in px.sources] == [13, 5]
    assert px.sources[1].images.float().mean() > 90
    assert read_others(photos, (3, 12, 12), classes=("cat", "dog")).y.bincount().tolist() == [9, 9]
    with pytest.raises(InputError, match=r"more' has other classes: unlabelled"):
        read_others(f"{tmp_path}/more", (3, 12, 12), classes=("cat", "dog"))
    with pytest.raises(InputError, match=r"\?size=N"):
        load_task("fmnist", px=f"{tmp_path}/more", generated=True)


def test_other_splits_and_huge_pictures_are_refused(tmp_path: Path):
    photos_in(tmp_path / "split" / "train")
    photos_in(tmp_path / "split" / "val")
    with pytest.raises(InputError, match=r"sub-folders train and val, which are no classes"):
        read_folder(f"{tmp_path}/split")
    photos_in(tmp_path / "huge")
    header = b"BM" + bytes(8) + struct.pack("<6I", 54, 40, 2**16, 2**16, 1 | 24 << 16, 0)
    (tmp_path / "huge" / "cat" / "9.bmp").write_bytes(header + bytes(100))
    with pytest.raises(InputError, match=r"9\.bmp cannot be read as an image"):
        read_folder(f"{tmp_path}/huge")


def test_folders_that_are_refused(tmp_path: Path):
    (tmp_path / "only").mkdir()
    with pytest.raises(MissingDataError, match="classes"):
        read_folder(str(tmp_path))
    photos = photos_in(tmp_path / "photos")
    with pytest.raises(InputError, match="size"):
        read_folder(f"{photos}?width=3")
    (photos / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="0.png"):
        read_folder(str(photos))


def test_a_class_that_may_not_be_read_is_not_left_out(tmp_path: Path, monkeypatch):
    photos = photos_in(tmp_path / "photos")
    photos_in(tmp_path / "other").joinpath("cat").rename(photos / "dog" / "inner")
    as_a_user = lambda path, _: path.stat().st_mode & 0o500 == 0o500  # noqa: E731
    monkeypatch.setattr("os.access", as_a_user)  # root may read everything
    for folder in (photos / "cat", photos / "dog" / "inner", photos):
        folder.chmod(0)
        try:
            with pytest.raises(InputError, match=f"{folder} cannot be read"):
                read_folder(str(photos))
        finally:
            folder.chmod(0o755)
    (photos / "cat" / ".hidden").mkdir(0)
    assert read_folder(str(photos)).classes == ("cat", "dog")


def test_no_name_is_not_the_current_folder(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(photos_in(tmp_path / "photos"))
    for name in ("", "?size=8"):
        assert main(["train", "--data", name, "--method", "ps-map"]) == 2
        assert f"{name!r} names no data" in capsys.readouterr().err


@pytest.mark.usefixtures("float32")
def test_a_run_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    photos, out = photos_in(tmp_path / "photos"), str(tmp_path / "run")
    sizes = ["--width", "2", "--batch-size", "4", "--num-points", "4", "--epochs", "1"]
    words = ["train", "--data", str(photos), *sizes, "--device", "cpu", "--silent", "--quick"]
    assert main([*words, "--reg-nats", "0.05", "--out", out]) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in ("0.05 nats", "class: cat 6, dog 7"))
    assert "generated" not in said
    assert main(["assess", out, "--device", "cpu", "--points", "4"]) == 0
    Image.new("RGB", (12, 12)).save(photos / "cat" / "new.png")
    read_folder.cache_clear()
    assert main(["assess", out, "--device", "cpu"]) == 2
    assert "trained on other images" in capsys.readouterr().err
    photos.rename(tmp_path / "moved")
    read_folder.cache_clear()
    module, progress = load_model(out)  # needs no photos
    images = progress["images"]
    assert (images["names"], images["shape"]) == (["cat", "dog"], [3, 12, 12])
    assert module(torch.zeros(1, 3, 12, 12)).shape == (1, 2)
