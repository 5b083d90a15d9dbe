"""One's own arrays and images."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedrts
import official
from fedrts import config, data
from fedrts.data.pixels import Pixels
from fedrts.errors import InputError
from fedrts.observe import Silent


def saved(path, **arrays):
    np.savez(path, **arrays)
    return f"npz:{path}"


X, Y = np.random.default_rng(0).normal(size=(20, 5)), np.arange(20) % 4


def test_numbers_with_a_test_set(tmp_path):
    held = data.load(saved(tmp_path / "a.npz", x=X, y=Y, x_test=X[:3], y_test=np.array([0, 1, 5])))
    assert torch.equal(held.x, torch.from_numpy(X).float())
    assert torch.equal(held.test_y, torch.tensor([0, 1, 5]))
    assert held.classes == 6
    assert held.view is None


def test_numbers_without_a_test_set_are_split_the_same_way_every_time(tmp_path):
    name = saved(tmp_path / "a.npz", x=X, y=Y)
    first, second = data.load(name), data.load(name)
    assert (len(first.y), len(first.test_y)) == (16, 4)
    assert torch.equal(first.test_x, second.test_x)
    rows = sorted(torch.cat([first.x, first.test_x]).tolist())
    assert rows == sorted(torch.from_numpy(X).float().tolist())
    assert len(data.load(name, {"test": 0.5}).test_y) == 10


@pytest.mark.parametrize("shape", [(20, 3, 8, 7), (20, 8, 7, 3), (20, 8, 7)])
def test_images_are_normalised(tmp_path, shape):
    x = official.pixels(*shape)
    held = data.load(saved(tmp_path / "a.npz", x=x, y=Y, x_test=x, y_test=Y), {"augment": "flip"})
    assert held.input_shape == ((1, 8, 7) if len(shape) == 3 else (3, 8, 7))
    whole = torch.from_numpy(x)
    whole = whole.unsqueeze(1) if len(shape) == 3 else whole.permute(0, 3, 1, 2) if shape[3] == 3 else whole
    assert torch.equal(held.x, whole)
    inputs = held.inputs(held.x)
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(held.input_shape[0]), atol=1e-4, rtol=0)
    assert isinstance(held.view, Pixels)
    assert held.view.flip


def test_images_are_normalised_without_a_look_at_the_test_share(tmp_path):
    held = data.load(saved(tmp_path / "a.npz", x=official.pixels(20, 3, 8, 7), y=Y))
    torch.testing.assert_close(held.inputs(held.x).mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)


def test_bad_arrays_are_one_clear_line(tmp_path):
    path = tmp_path / "a.npz"
    objects = np.array([{"a": 1}] * 20, dtype=object)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": X}, "y is missing"),
        ({"x": X, "y": Y, "x_test": X}, "y_test is missing"),
        ({"x": X[:0], "y": Y[:0]}, "x is empty"),
        ({"x": X[:9], "y": Y}, "x has 9 rows, its labels are 20"),
        ({"x": X, "y": Y.astype(float)}, "one whole number from 0"),
        ({"x": X, "y": Y - 1}, "one whole number from 0"),
        ({"x": X[:, 0], "y": Y}, "one row a sample"),
        ({"x": np.where(X > 1, np.nan, X), "y": Y}, "not finite"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, "x_test"),
        ({"x": official.pixels(20, 4), "y": Y}, "images are"),
        ({"x": objects, "y": Y}, "plain arrays"),
    ]
    for arrays, words in cases:
        name = saved(path, **arrays)
        with pytest.raises(InputError, match=words) as caught:
            data.load(name)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    for content in (b"", b"text", path.read_bytes()[:200]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"no \.npz file"):
            data.load(f"npz:{path}")
    with pytest.raises(InputError, match="there is no file"):
        data.load(f"npz:{tmp_path}/none.npz")
    with pytest.raises(InputError, match="augment is for images"):
        data.load(saved(path, x=X, y=Y), {"augment": True})


def images(root, classes=("cat", "dog"), each=5, size=8, suffix="png"):
    made = {}
    for number, name in enumerate(classes):
        for index in range(each):
            image = official.smooth(1, size, seed=100 * number + index)[0]
            official.save(image, root / name / f"{index}.{suffix}")
            made[name, index] = image
    return made


def test_a_folder_with_train_and_test(tmp_path):
    train, test = images(tmp_path / "in" / "train"), images(tmp_path / "in" / "test", each=2)
    for _ in ("cold", "warm"):
        held = data.load(f"folder:{tmp_path}/in", {}, tmp_path / "home")
        assert held.y.tolist() == [0] * 5 + [1] * 5
        assert held.test_y.tolist() == [0, 0, 1, 1]
        assert torch.equal(held.x[7], torch.from_numpy(train["dog", 2]).permute(2, 0, 1))
        assert torch.equal(held.test_x[1], torch.from_numpy(test["cat", 1]).permute(2, 0, 1))
        assert held.classes == 2
        torch.testing.assert_close(held.inputs(held.x).mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    assert not list((tmp_path / "in").glob(".*")), "nothing is written beside the images"


def test_a_folder_without_test_images_is_split(tmp_path):
    images(tmp_path / "in", suffix="jpg")
    first, second = (data.load(f"folder:{tmp_path}/in", {"test": 0.3}, tmp_path) for _ in range(2))
    assert (len(first.y), len(first.test_y)) == (7, 3)
    assert torch.equal(first.test_x, second.test_x)
    torch.testing.assert_close(first.inputs(first.x).mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)


def test_images_of_other_sizes_are_resized_when_asked(tmp_path):
    images(tmp_path / "in")
    official.save(official.smooth(1, 20)[0], tmp_path / "in" / "cat" / "9.png")
    with pytest.raises(InputError, match=r"9\.png has 20×20 pixels, not 8×8 as it should.*data_options\.size"):
        data.load(f"folder:{tmp_path}/in", {}, tmp_path)
    assert data.load(f"folder:{tmp_path}/in", {"size": 6}, tmp_path).input_shape == (3, 6, 6)
    with pytest.raises(InputError, match=r"data_options\.size must be"):
        data.load(f"folder:{tmp_path}/in", {"size": 0}, tmp_path)


def test_images_of_16_bits_keep_their_upper_8(tmp_path):
    images(tmp_path / "in")
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
    official.save(values, tmp_path / "in" / "cat" / "9.png")
    held = data.load(f"folder:{tmp_path}/in", {}, tmp_path)
    wanted = torch.from_numpy((values // 256).astype(np.uint8)).expand(3, 8, 8)
    assert any(torch.equal(image, wanted) for image in [*held.x, *held.test_x])


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_images_of_unknown_range_are_refused(tmp_path, kind):
    images(tmp_path / "in")
    Image.fromarray(np.full((8, 8), 300, kind)).save(tmp_path / "in" / "cat" / "9.png", format="TIFF")
    with pytest.raises(InputError, match=r"9\.png has pixels of 32 bits, whose range is unknown: save it with 8 or 16 bits") as caught:
        data.load(f"folder:{tmp_path}/in", {}, tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_folders_are_one_clear_line(tmp_path):
    root = tmp_path / "in"
    with pytest.raises(InputError, match=f"there is no folder {root}"):
        data.load(f"folder:{root}", {}, tmp_path)
    images(root, classes=("cat",))
    with pytest.raises(InputError, match="holds 1 folders"):
        data.load(f"folder:{root}", {}, tmp_path)
    (root / "dog").mkdir()
    with pytest.raises(InputError, match=f"no images in {root}/dog"):
        data.load(f"folder:{root}", {}, tmp_path)
    (root / "dog" / "a.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"a\.png is no readable image"):
        data.load(f"folder:{root}", {}, tmp_path)
    images(tmp_path / "two" / "train")
    images(tmp_path / "two" / "test", classes=("cat", "hen"))
    with pytest.raises(InputError, match="class 'dog' is in only one of train and test"):
        data.load(f"folder:{tmp_path}/two", {}, tmp_path)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, np.full(20, 2**63, np.uint64), "one whole number"),
        (np.full((20, 5), 1e300), Y, "not finite in float32"),
    ],
)
def test_numbers_that_are_too_large(tmp_path, x, y, words):
    with pytest.raises(InputError, match=words):
        data.load(saved(tmp_path / "a.npz", x=x, y=y))


def test_paths_are_made_absolute_so_that_a_run_can_be_resumed_from_anywhere(tmp_path, monkeypatch):
    saved(tmp_path / "a.npz", x=X, y=Y)
    monkeypatch.chdir(tmp_path)
    settings = {"data": "npz:a.npz", "clients": {"total": 2, "min_size": 1, "partition": "iid"}, "rounds": 1}
    assert config.resolve(settings).data == f"npz:{tmp_path}/a.npz"
    assert config.resolve({"data": "digits"}).data == "digits"
    with pytest.raises(InputError, match="names no path"):
        config.resolve({**settings, "data": "npz:"})


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    name = saved(tmp_path / "a.npz", x=X, y=Y)
    keywords = {"data": name, "clients": {"total": 2, "per_round": 2, "min_size": 1, "partition": "iid"}, "rounds": 2, "density": 0.9}

    class StopsAfterOne(Silent):
        def played(self, record):
            if record.round == 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedrts.run(**keywords, out=tmp_path / "run", observer=StopsAfterOne())
    saved(tmp_path / "a.npz", x=X + 1, y=Y)
    with pytest.raises(InputError, match="clients' data is not that of the checkpoint"):
        fedrts.resume(tmp_path / "run")
    saved(tmp_path / "a.npz", x=X, y=Y)
    assert fedrts.resume(tmp_path / "run").summary["rounds"] == 2
