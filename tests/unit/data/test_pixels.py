"""Normalisation and augmentation: against a written-out loop, and the same for one client or many."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.data.contract import Data
from fedrts.data.pixels import Pixels
from fedrts.sparse import random

MEAN, STD = (0.5, 0.25, 0.4), (0.2, 0.3, 0.25)


def images(count, height=12, width=9, channels=3, seed=0):
    return torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def written_out(view, x, u):
    """One image, pixel by pixel: (x/255 − mean)/std of the cropped and flipped image, 0 in the hole."""
    channels, height, width = x.shape
    up, left = (int(float(number) * (2 * view.crop + 1)) - view.crop for number in u[:2])
    flipped = view.flip and float(u[2]) < 0.5
    middle = int(float(u[3]) * height), int(float(u[4]) * width)
    out = torch.zeros(x.shape)
    half = view.cutout // 2
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                row, column = i + up, (width - 1 - j if flipped else j) + left
                inside = 0 <= row < height and 0 <= column < width
                value = float(x[c, row, column]) / 255 if inside else 0.0
                hole = view.cutout and middle[0] - half <= i < middle[0] + half and middle[1] - half <= j < middle[1] + half
                out[c, i, j] = 0.0 if hole else (value - MEAN[c]) / STD[c]
    return out


@pytest.mark.parametrize("augment", ["crop", "flip", "cutout", "crop+flip", "crop+flip+cutout"])
def test_augmentation_is_what_a_loop_over_pixels_does(augment):
    view = Pixels.of(MEAN, STD, augment)
    x, u = images(12), random.uniform(1, 12 * view.numbers).view(12, -1)
    expected = torch.stack([written_out(view, image, numbers) for image, numbers in zip(x, u, strict=True)])
    torch.testing.assert_close(view.augment(x, u), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("augment", ["crop", "flip", "cutout"])
def test_every_augmentation_changes_images_and_keeps_some(augment):
    view = Pixels.of(MEAN, STD, augment)
    x = images(200)
    same = (view.augment(x, random.uniform(2, 200 * 5).view(200, 5)) == view.inputs(x)).flatten(1).all(1)
    expected = {"crop": 1 / 81, "flip": 1 / 2, "cutout": 0}[augment]
    assert abs(float(same.float().mean()) - expected) < 0.1


def test_the_extremes_of_the_uniform_numbers_stay_inside():
    view = Pixels.of(MEAN, STD, "crop+flip+cutout")
    x = images(2)
    u = torch.stack([torch.zeros(5), torch.full((5,), 1 - 2.0**-24)])
    expected = torch.stack([written_out(view, image, numbers) for image, numbers in zip(x, u, strict=True)])
    torch.testing.assert_close(view.augment(x, u), expected, rtol=0, atol=1e-5)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**63))
def test_many_clients_at_once_get_what_each_would_alone(sizes, seed):
    view = Pixels.of(MEAN, STD, "crop+flip+cutout")
    x = images(sum(sizes), seed=1)
    u = [random.uniform(random.key(seed, client), size * view.numbers).view(size, -1) for client, size in enumerate(sizes)]
    together = view.augment(x, torch.cat(u))
    alone = torch.cat([view.augment(part, numbers) for part, numbers in zip(x.split(sizes), u, strict=True)])
    assert torch.equal(together, alone)


def test_normalised_pixels_have_mean_0_and_deviation_1():
    from fedrts.data.images import statistics

    x = images(50) // torch.tensor([1, 2, 4], dtype=torch.uint8).view(3, 1, 1)
    inputs = Pixels.of(*statistics(x)).inputs(x)
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    assert statistics(torch.zeros(2, 1, 3, 3, dtype=torch.uint8)) == ([0.0], [1.0]), "a constant image is left as it is"


def test_training_batches_follow_their_key():
    x, y = images(30), torch.arange(30)
    view = Pixels.of(MEAN, STD, "crop+flip+cutout")
    held = Data(x, y, x, y, 30, view=view)
    rows = torch.tensor([3, 7, 11, 2])
    first, targets = held.training_batch(rows, key=5)
    assert torch.equal(targets, rows)
    assert torch.equal(first, held.training_batch(rows, key=5)[0])
    assert not torch.equal(first, held.training_batch(rows, key=6)[0])
    assert torch.equal(first, view.augment(x[rows], random.uniform(5, 20).view(4, 5)))
    assert torch.equal(held.training_batch(rows, key=None)[0], held.inputs(x[rows]))


def test_float_data_pass_through_untouched():
    x = torch.randn(6, 4)
    held = Data(x, torch.arange(6), x, torch.arange(6), 6)
    assert held.inputs(x) is x
    assert torch.equal(held.training_batch(torch.tensor([1, 2]), key=3)[0], x[1:3])


def test_evaluation_reads_normalised_images_and_leaves_the_mode_alone():
    x, y = images(20), torch.arange(20) % 3
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(324, 3), torch.nn.BatchNorm1d(3))
    stored = Data(x, y, x, y, 3, view=Pixels.of(MEAN, STD, "crop"), valid_x=x[:5], valid_y=y[:5])
    plain = stored.inputs(x)
    ready = Data(plain, y, plain, y, 3, valid_x=plain[:5], valid_y=y[:5])
    for training in (True, False):
        model.train(training)
        assert stored.evaluate(model, 7) == ready.evaluate(model, 7)
        assert model.training == model[2].training == training
    assert set(stored.evaluate(model, 7)) == {"loss", "accuracy", "valid_accuracy"}


def test_data_move_with_their_view():
    x, y = images(4), torch.arange(4)
    moved = Data(x, y, x, y, 4, view=Pixels.of(MEAN, STD), valid_x=x, valid_y=y).to("meta")
    assert isinstance(moved.view, Pixels)
    tensors = (moved.x, moved.y, moved.test_x, moved.test_y, moved.valid_x, moved.valid_y, moved.view.scale, moved.view.shift)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
