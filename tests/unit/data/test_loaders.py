"""Every loader on tiny files in the official format, and on damaged ones."""

import gzip
import os

import numpy as np
import pytest
import torch

import official
from fedrts import data
from fedrts.data.pixels import Pixels
from fedrts.data.tinystories import Tokens, _frequent
from fedrts.errors import InputError
from fedrts.tasks import Language
from helping import source_of

MAPPED = ("x", "y", "test_x", "test_y")


def equal(tensor, array, within=0):
    assert tuple(tensor.shape) == array.shape
    assert int((tensor.long() - torch.from_numpy(array.astype(np.int64))).abs().max()) <= within


@pytest.mark.parametrize("name", ["cifar10", "svhn", "tinyimagenet", "fashion_mnist"])
def test_images_are_read_as_they_are(name, tmp_path):
    made = official.IMAGES[name](tmp_path)
    for _ in ("cold", "warm"):
        held = data.load(name, {}, tmp_path)
        for key, array in zip(MAPPED, made, strict=True):
            equal(getattr(held, key), array, within=2 if name == "tinyimagenet" else 0)
        assert held.x.dtype == held.test_x.dtype == torch.uint8
        assert held.y.dtype == held.test_y.dtype == torch.int64
        assert held.classes == (3 if name == "tinyimagenet" else 10)
        assert held.valid_x is None


def test_cinic10_has_three_parts(tmp_path):
    x, y, valid_x, valid_y, test_x, test_y = official.cinic10(tmp_path)
    held = data.load("cinic10", {}, tmp_path)
    found = (held.x, held.y, held.valid_x, held.valid_y, held.test_x, held.test_y)
    for tensor, array in zip(found, (x, y, valid_x, valid_y, test_x, test_y), strict=True):
        equal(tensor, array)
    both = data.load("cinic10", {"train": "train+valid"}, tmp_path)
    equal(both.x, np.concatenate([x, valid_x]))
    equal(both.y, np.concatenate([y, valid_y]))
    assert both.valid_x is None
    assert data.load("cinic10", {"validation": False}, tmp_path).valid_x is None
    with pytest.raises(InputError, match="train must be 'train' or 'train\\+valid'"):
        data.load("cinic10", {"train": "all"}, tmp_path)
    for options in ({"validation": 0.1}, {"train": "train+valid", "validation": True}):
        with pytest.raises(InputError, match=r"data_options\.validation of cinic10 must be"):
            data.load("cinic10", options, tmp_path)


def test_stories_become_tokens_with_shifted_targets(tmp_path):
    words = official.tinystories(tmp_path)
    end = words.index("<|endoftext|>")
    held = data.load("tinystories", {"length": 8}, tmp_path)
    assert held.classes == len(words)
    assert held.task == Language(padding=end)
    assert (held.x.shape, held.test_x.shape) == ((3, 7), (1, 7))

    def spelled(stored):
        return [words[number] for number in held.inputs(stored).tolist()]

    assert held.x.dtype == torch.int16
    assert spelled(held.x[0]) == ["A", "n", "n", "Ġ", "r", "an", "."]
    assert spelled(held.y[0]) == ["n", "n", "Ġ", "r", "an", ".", "<|endoftext|>"]
    assert spelled(held.x[1]) == list("BenĠsat"), "cut"
    assert int(held.targets(held.y)[1, -1]) != end
    assert spelled(held.x[2]) == list("CyĠate."), "stripped"
    x, y = held.training_batch(torch.tensor([0, 2]), key=1)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert len(data.load("tinystories", {"length": 8, "share": 0.7}, tmp_path).x) == 2
    for options, words in (({"length": 1}, "length"), ({"share": 0}, "share"), ({"share": 2}, "share")):
        with pytest.raises(InputError, match=f"data_options.{words} must be"):
            data.load("tinystories", options, tmp_path)


def test_more_frequent_words_than_signed_16_bits_count():
    numbers = _frequent(torch.arange(50_000).to(torch.int16), classes=50_000, words=40_000, end=7)
    tokens = Tokens().inputs(numbers)
    assert tokens[7] == 0
    assert tokens.bincount().tolist() == [1] * 39_999 + [10_001]


def test_tokens_beyond_32767_survive_16_bits():
    stored = torch.tensor([0, 32767, 32768, 50256, 65535]).to(torch.uint16).view(torch.int16)
    assert Tokens().inputs(stored).tolist() == [0, 32767, 32768, 50256, 65535]


@pytest.mark.parametrize("name", official.ALL)
def test_missing_files_are_one_line_that_says_what_to_do(name, tmp_path):
    with pytest.raises(InputError) as caught:
        data.load(name, {}, tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    assert f"'{name}' is not in {tmp_path}" in line
    assert f"fedrts data prepare {name}" in line
    for file in source_of(name).files:
        assert file.url in line
        assert str(tmp_path / file.to) in line


def test_the_folder_is_the_one_given_else_the_variable_else_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRTS_DATA", str(tmp_path / "b"))
    assert data.home(tmp_path / "a") == tmp_path / "a"
    assert data.home() == tmp_path / "b"
    monkeypatch.delenv("FEDRTS_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.home() == tmp_path / ".cache" / "fedrts"


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def write(content):
    return lambda path: path.write_bytes(content)


def label(value, offset):
    def change(path):
        content = bytearray(path.read_bytes())
        content[offset] = value
        path.write_bytes(content)

    return change


def mat(**variables):
    from scipy.io import savemat

    return lambda path: savemat(path, variables)


IMAGE = np.zeros((32, 32, 3, 2), np.uint8)
IDX = "fashion-mnist/train-images-idx3-ubyte.gz"
BAD = [
    ("cifar10", "cifar-10-batches-bin/data_batch_3.bin", cut, "no whole number of images"),
    ("cifar10", "cifar-10-batches-bin/test_batch.bin", write(b""), "0 bytes"),
    ("cifar10", "cifar-10-batches-bin/data_batch_1.bin", label(11, 3073), "label 11"),
    ("svhn", "svhn/train_32x32.mat", write(b"not a mat file"), "no readable .mat"),
    ("svhn", "svhn/train_32x32.mat", write(b""), "no readable .mat"),
    ("svhn", "svhn/test_32x32.mat", cut, "no readable .mat"),
    ("svhn", "svhn/test_32x32.mat", mat(X=IMAGE), "no variable 'y'"),
    ("svhn", "svhn/test_32x32.mat", mat(X=IMAGE, y=np.array([[0], [3]])), "labels from 0 to 3"),
    ("svhn", "svhn/test_32x32.mat", mat(X=IMAGE, y=np.array([[1], [2], [3]])), "3 labels"),
    ("svhn", "svhn/test_32x32.mat", mat(X=IMAGE.astype(float), y=np.array([[1], [2]])), "float64"),
    ("tinyimagenet", "tiny-imagenet-200/train/n01/images/n01_1.JPEG", write(b"no image"), "no readable image"),
    (
        "tinyimagenet",
        "tiny-imagenet-200/train/n01/images/n01_1.JPEG",
        cut,
        "no readable image",
    ),
    ("tinyimagenet", "tiny-imagenet-200/train/n01/images/n01_1.JPEG", lambda path: official.save(official.smooth(1, 32)[0], path), "32×32"),
    ("tinyimagenet", "tiny-imagenet-200/val/val_annotations.txt", write(b"val_0.JPEG\tn99\t0\n"), "line 1: class 'n99'"),
    ("tinyimagenet", "tiny-imagenet-200/val/val_annotations.txt", write(b"val_9.JPEG\tn01\t0\n"), "cannot read"),
    ("tinyimagenet", "tiny-imagenet-200/val/val_annotations.txt", write(b""), "is empty"),
    ("tinyimagenet", "tiny-imagenet-200/wnids.txt", write(b"n01\nn02\nn03\nn04\n"), "n04"),
    ("cinic10", "cinic-10/valid/cat/cifar10-valid-007.png", cut, "no readable image"),
    ("cinic10", "cinic-10/test/ship", lambda path: [file.unlink() for file in path.iterdir()], "no images"),
    ("cinic10", "cinic-10/test/ship", lambda path: path.rename(path.with_name("boat")), "no folder"),
    ("fashion_mnist", IDX, cut, "no complete gzip"),
    ("fashion_mnist", IDX, write(b"plain"), "no complete gzip"),
    ("fashion_mnist", IDX, write(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 5]))), "no idx file"),
    ("fashion_mnist", IDX, write(gzip.compress(b"")), "no idx file"),
    ("fashion_mnist", "fashion-mnist/train-labels-idx1-ubyte.gz", write(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 5]))), "1 labels"),
    (
        "fashion_mnist",
        "fashion-mnist/t10k-labels-idx1-ubyte.gz",
        write(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 4, 5, 6, 7, 10]))),
        "label 10",
    ),
    ("tinystories", "tinystories/TinyStories-train.txt", write(b"no end"), "no line <|endoftext|>"),
    ("tinystories", "tinystories/TinyStories-train.txt", write(b"\n"), "no stories"),
    ("tinystories", "tinystories/TinyStories-train.txt", write(b"\xff\xfe\n"), "cannot read"),
    ("tinystories", "gpt2/vocab.json", write(b"{"), "no readable vocabulary"),
    ("tinystories", "gpt2/vocab.json", write(b'{"a": 0, "n": 1, "an": 2}'), "no <|endoftext|>"),
]


@pytest.mark.parametrize(("name", "file", "damage", "words"), BAD)
def test_damaged_files_are_one_clear_line(name, file, damage, words, tmp_path):
    official.ALL[name](tmp_path)
    damage(tmp_path / file)
    with pytest.raises(InputError) as caught:
        data.load(name, {}, tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / ".cache").glob(f"{name}*")), "nothing is kept of it"


def test_a_changed_source_is_read_again(tmp_path):
    official.cifar10(tmp_path)
    before = data.load("cifar10", {}, tmp_path)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    label(9, 0)(file)
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1000))
    after = data.load("cifar10", {}, tmp_path)
    assert (int(before.y[4]), int(after.y[4])) == (8, 9)
    assert len(list((tmp_path / ".cache").glob("cifar10-*"))) == 1, "the old one is gone"


def test_a_warm_cache_decodes_nothing(tmp_path, monkeypatch):
    official.tinyimagenet(tmp_path)
    cold = data.load("tinyimagenet", {}, tmp_path)
    monkeypatch.setattr("fedrts.data.tinyimagenet.decode", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(data.load("tinyimagenet", {}, tmp_path).x, cold.x)


@pytest.mark.parametrize("name", official.ALL)
def test_a_data_set_can_be_moved_with_its_cache(name, tmp_path, monkeypatch):
    official.ALL[name](tmp_path / "a")
    data.load(name, {}, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.setattr("fedrts.data.cache._Store.make", lambda *_: pytest.fail("decoded again"))
    assert len(data.load(name, {}, tmp_path / "b").x)


def test_a_loader_must_return_data(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def pairs():\n    return [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"'mine:pairs' must be a fedrts\.data\.contract\.Data, not list"):
        data.load("mine:pairs")


@pytest.mark.parametrize("name", official.IMAGES)
def test_the_options_of_augmentation(name, tmp_path):
    official.ALL[name](tmp_path)
    suits = {
        "cifar10": (4, True, 16),
        "cinic10": (4, True, 16),
        "svhn": (4, False, 16),
        "tinyimagenet": (4, True, 0),
        "fashion_mnist": (4, True, 0),
    }

    def strength(augment):
        view = data.load(name, {"augment": augment}, tmp_path).view
        assert isinstance(view, Pixels)
        return view.crop, view.flip, view.cutout

    assert strength(True) == suits[name]
    assert strength(False) == strength("") == (0, False, 0)
    assert strength("flip+cutout") == (0, True, 16)
    with pytest.raises(InputError, match="did you mean 'crop'"):
        strength("crops")
    with pytest.raises(InputError, match=r"data_options\.augment must be"):
        strength(3)


def test_the_validation_share_is_split_off_any_data_set(tmp_path):
    official.cifar10(tmp_path)
    whole = data.load("cifar10", {}, tmp_path)
    held = data.load("cifar10", {"validation": 0.25}, tmp_path)
    assert held.valid_x is not None
    assert held.valid_y is not None
    assert (len(held.x), len(held.valid_x)) == (15, 5)
    rows = {tuple(image.flatten().tolist()): int(label) for image, label in zip(whole.x, whole.y, strict=True)}
    found = [*zip(held.x, held.y, strict=True), *zip(held.valid_x, held.valid_y, strict=True)]
    assert {tuple(image.flatten().tolist()): int(label) for image, label in found} == rows
    assert torch.equal(held.test_x, whole.test_x)
    again = data.load("cifar10", {"validation": 0.25}, tmp_path)
    assert again.valid_x is not None
    assert torch.equal(held.valid_x, again.valid_x)
    for share in (-0.1, 1, True, "a", 0.01):
        with pytest.raises(InputError, match=r"data_options\.validation"):
            data.load("cifar10", {"validation": share}, tmp_path)
