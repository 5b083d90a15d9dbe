"""Real data: what FEDRTS_DATA holds, else what the packs in ../shared/data unpack to; skipped where there is neither."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedrts import data
from fedrts.data.images import statistics
from fedrts.tasks import Language
from helping import source_of

PACKS = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory):
    """`real(name)` is a folder that holds the data set."""
    unpacked = tmp_path_factory.mktemp("unpacked")

    def find(name: str) -> Path:
        given = os.environ.get(data.VARIABLE)
        if given and not source_of(name).missing(Path(given)):
            return Path(given)
        if not (PACKS / "unpack.py").exists() or name == "fashion_mnist":
            pytest.skip(f"{name} is not here: set {data.VARIABLE}")
        subprocess.run([sys.executable, str(PACKS / "unpack.py"), str(unpacked), name], check=True, capture_output=True)
        return unpacked

    return find


SHAPES = {
    "cifar10": ((50000, 3, 32, 32), 10000, 10),
    "svhn": ((73257, 3, 32, 32), 26032, 10),
    "tinyimagenet": ((None, 3, 64, 64), None, None),
    "fashion_mnist": ((60000, 1, 28, 28), 10000, 10),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_images(real, name):
    held = data.load(name, {}, real(name))
    shape, test, classes = SHAPES[name]
    assert all(wanted in (None, found) for wanted, found in zip(shape, held.x.shape, strict=True))
    assert test in (None, len(held.test_x))
    assert classes in (None, held.classes)
    assert sorted(held.y.unique().tolist()) == list(range(held.classes))
    assert sorted(held.test_y.unique().tolist()) == list(range(held.classes))
    inputs = Statistics(*statistics(held.x), held.view)
    assert inputs.mean.abs().max() < 0.12, "the constants are those of the data (the packs are re-compressed)"
    assert (inputs.std - 1).abs().max() < 0.12


class Statistics:
    """Mean and deviation of normalised pixels, from those of the stored ones."""

    def __init__(self, mean, std, view):
        scale, shift = view.scale.flatten() * 255, view.shift.flatten()
        self.mean, self.std = torch.tensor(mean) * scale + shift, torch.tensor(std) * scale


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stories(real):
    home = real("tinystories")
    held = data.load("tinystories", {}, home)
    assert held.classes == 50257
    assert isinstance(held.task, Language)
    assert held.task.padding == 50256
    assert held.x.shape[1] == 255
    words = {number: word for word, number in json.loads((home / "gpt2" / "vocab.json").read_text("utf-8")).items()}
    text = "".join(words[number] for number in held.inputs(held.x[0]).tolist() if number != 50256).replace("Ġ", " ").replace("Ċ", "\n")
    first = (home / "tinystories" / "TinyStories-train.txt").read_text("utf-8").partition("<|endoftext|>")[0].strip()
    assert text.encode("ascii", "ignore")[:40] == first.encode("ascii", "ignore")[:40]
    x, y = held.training_batch(torch.arange(5), key=0)
    assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cifar10_can_be_learned(real):
    """A tenth of the images, four classes' worth of a second: far above chance after a few steps."""
    held = data.load("cifar10", {"augment": "crop+flip"}, real("cifar10"))
    torch.manual_seed(0)
    relu, pool = torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    layers = [torch.nn.Conv2d(3, 16, 3), relu, pool, torch.nn.Conv2d(16, 32, 3), relu, pool, torch.nn.Flatten(), torch.nn.Linear(1152, 10)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, rows in enumerate(torch.randperm(50000)[:12800].split(64)):
        x, y = held.training_batch(rows, key=step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert held.evaluate(model, 1000)["accuracy"] > 0.3
