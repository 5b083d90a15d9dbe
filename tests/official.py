"""Tiny data sets in the official formats, written by the tests themselves; each function returns what a loader must read."""

import gzip
import json

import numpy as np

CINIC = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
WNIDS = ("n02", "n01", "n03")


def pixels(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def smooth(count, size, seed=0):
    """`[n, size, size, 3]` images of one colour each, which JPEG hardly changes."""
    return np.broadcast_to(pixels(count, 1, 1, 3, seed=seed), (count, size, size, 3)).copy()


def save(image, path):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, quality=95)


def cifar10(home, each=4):
    folder = home / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    x, y = pixels(6 * each, 3, 32, 32), (np.arange(6 * each) * 7 % 10).astype(np.uint8)
    for index, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        rows = slice(index * each, (index + 1) * each)
        np.concatenate([y[rows, None], x[rows].reshape(each, -1)], axis=1).tofile(folder / f"{name}.bin")
    return x[: 5 * each], y[: 5 * each], x[5 * each :], y[5 * each :]


def svhn(home, train=12, test=5):
    from scipy.io import savemat

    (home / "svhn").mkdir(parents=True)
    made = []
    for name, count in (("train", train), ("test", test)):
        x, y = pixels(count, 3, 32, 32, seed=count), np.arange(count) % 10
        labels = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
        savemat(home / "svhn" / f"{name}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": labels})
        made += [x, y]
    return made


def tinyimagenet(home, each=3):
    root = home / "tiny-imagenet-200"
    x, y = smooth(3 * each, 64), np.repeat(np.arange(3), each)
    for index in range(3 * each):
        name = WNIDS[y[index]]
        save(x[index], root / "train" / name / "images" / f"{name}_{index % each}.JPEG")
    test_x, test_y = smooth(4, 64, seed=1), np.array([2, 0, 0, 1])
    for index in range(4):
        save(test_x[index], root / "val" / "images" / f"val_{index}.JPEG")
    notes = "".join(f"val_{index}.JPEG\t{WNIDS[label]}\t0\t0\t62\t62\n" for index, label in enumerate(test_y))
    (root / "val" / "val_annotations.txt").write_text(notes)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return x.transpose(0, 3, 1, 2), y, test_x.transpose(0, 3, 1, 2), test_y


def cinic10(home, each=2):
    made = []
    for seed, split in enumerate(("train", "valid", "test")):
        x, y = pixels(10 * each, 32, 32, 3, seed=seed), np.repeat(np.arange(10), each)
        for index, image in enumerate(x):
            save(image, home / "cinic-10" / split / CINIC[y[index]] / f"cifar10-{split}-{index:03}.png")
        made += [x.transpose(0, 3, 1, 2), y]
    return made


def fashion_mnist(home, train=9, test=4):
    folder = home / "fashion-mnist"
    folder.mkdir(parents=True)
    made = []
    for name, count in (("train", train), ("t10k", test)):
        x, y = pixels(count, 28, 28, seed=count), (np.arange(count) % 10).astype(np.uint8)
        head = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + x.tobytes()))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + y.tobytes()))
        made += [x[:, None], y]
    return made


STORIES = (["Ann ran.", "Ben sat\n\nand sat.", "  Cy ate.  "], ["Dot hid."])


def tinystories(home):
    """Stories, and a vocabulary of single bytes, one pair, and the end of a text."""
    from tokenizers.pre_tokenizers import ByteLevel

    (home / "tinystories").mkdir(parents=True)
    (home / "gpt2").mkdir()
    for name, stories in zip(("train", "valid"), STORIES, strict=True):
        text = "".join(f"{story}\n<|endoftext|>\n" for story in stories)
        (home / "tinystories" / f"TinyStories-{name}.txt").write_text(text, "utf-8")
    words = [*sorted(ByteLevel.alphabet()), "an", "<|endoftext|>"]
    (home / "gpt2" / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}), "utf-8")
    (home / "gpt2" / "merges.txt").write_text("#version: 0.2\na n\n", "utf-8")
    return words


IMAGES = {function.__name__: function for function in (cifar10, svhn, tinyimagenet, cinic10, fashion_mnist)}
ALL = IMAGES | {"tinystories": tinystories}
