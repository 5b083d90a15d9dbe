"""Archives of models: their bytes, what comes back of them, what the C reader and program make of them, and of damaged ones."""

import contextlib
import copy
import json
import os
import random
import struct
import subprocess
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrts import models
from fedrts.programs import archive
from fedrts.programs.archive import ArchiveContent, ArchivedTensor, OpenedArchive, write
from fedrts.programs.parts import read
from fedrts.programs.stages import fused
from fedrts.sparse.layout import Layout
from fedrts.wire import positions
from fedrts.wire.errors import WireError
from fedrts.wire.fields.coded import write_positions
from fedrts.wire.packing import varint

fedrts_kernels = pytest.importorskip("fedrts_kernels")
if not fedrts_kernels.FILE.exists():
    pytest.skip("fedrts-kernels has no library: there was no C compiler", allow_module_level=True)
ISAS = fedrts_kernels.load().isas


def sparse(module, shape, density=0.3, seed=0):
    """The module with so many of its weights, and vectors and statistics that show."""
    torch.manual_seed(seed)
    with torch.no_grad():
        module.train()(torch.randn(8, *shape) * 2 + 1)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand_like(parameter) < density)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def content(module, shape, unit="link", normalisation=None):
    layout, tensors = Layout.of(module, unit=unit), module.state_dict()
    held = [ArchivedTensor(entry.names, tensors[entry.name], entry.block) for entry in layout.entries]
    held += [ArchivedTensor((name,), tensors[name]) for name in layout.constants]
    stages = fused(read(module, torch.randn(2, *shape)))
    return ArchiveContent({"model": "x"}, tuple(shape), stages[-1].shape[0], normalisation, held, stages)


def predicted(data, x, isa=None):
    model = fedrts_kernels.Model(data, isa)
    return np.asarray(model(x.numpy()), np.float32).reshape(len(x), -1)


def agree(module, data, x, isa=None):
    with torch.no_grad():
        wanted = copy.deepcopy(module).double()(x.double()).numpy()
    np.testing.assert_allclose(predicted(data, x, isa), wanted, rtol=1e-4, atol=1e-5)


def sealed(body):
    return body + struct.pack("<I", zlib.crc32(body))


def tiny():
    """Two features, one hidden ReLU, two outputs."""
    first, last = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, -2.0]]))
        first.bias.copy_(torch.tensor([0.5, 0.0, 4.0]))
        last.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 1.0, 0.5]]))
    return nn.Sequential(first, nn.ReLU(), last).eval()


GOLDEN = (
    "46525441 01 0e 7b226d6f64656c223a202278227d"  # FRTA, version, {"model": "x"}
    "01 02 02 00"  # one side of 2 numbers, 2 outputs, nothing is normalised
    "03"  # tensors
    "01 08 302e776569676874 00 02 03 02 00 00 00 03 01 21 0000803f 000000c0"  # 0.weight: bitmap of links 0 and 5
    "01 06 302e62696173 00 01 03 00 00 00 03 01 05 0000003f 00008040"  # 0.bias: bitmap
    "01 08 322e776569676874 00 02 02 03 00 00 00 01 00 0000803f 00000040 00004040 000080bf 0000803f 0000003f"  # 2.weight: all
    "03"  # operations
    "00 00 00 00 01"  # features come in
    "01 01 00 00 01 02 01 01 01 01 00 00 01 01 01"  # links with tensor 0 and bias 1, then ReLU
    "01 00 01 00 03 00 01 01 01 01 00 00 01 01 01"  # links with tensor 2
)


def test_the_bytes_are_those_that_the_documentation_describes():
    data = write(content(tiny(), (2,)))
    assert data[:-4].hex(" ") == bytes.fromhex(GOLDEN).hex(" ")
    assert data == sealed(bytes.fromhex(GOLDEN))
    found = predicted(data, torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
    assert found.tolist() == [[1.5 + 3 * 2, -1.5 + 0.5 * 2], [0.5, -0.5]]


@pytest.mark.parametrize("unit", ["link", "kernel", "block:2×4"])
@pytest.mark.parametrize("value_type", ["float32", "float16", "int8"])
def test_what_was_written_comes_back(unit, value_type):
    module = sparse(models.get("cnn")((3, 8, 8), 10), (3, 8, 8))
    data = write(content(module, (3, 8, 8), unit), value_type)
    opened = OpenedArchive.of(data)
    assert (opened.about, opened.input_shape, opened.outputs) == ({"model": "x"}, (3, 8, 8), 10)
    found, wanted = opened.tensors(module.state_dict()), module.state_dict()
    for name, tensor in wanted.items():
        exact = value_type == "float32" or tensor.dim() < 2
        assert torch.equal(found[name], tensor) if exact else torch.equal(found[name] != 0, tensor != 0) or value_type == "int8"
        assert float((found[name] - tensor).abs().max()) <= float(tensor.abs().max()) / (1000 if value_type == "float16" else 120)
    copied = copy.deepcopy(module)
    copied.load_state_dict(found)
    agree(copied, data, torch.randn(5, 3, 8, 8))


def test_size_follows_density_and_units():
    def size(density, unit="link", value_type="float32"):
        module = models.get("resnet18_small")((3, 8, 8), 10)
        for parameter in module.parameters():
            if parameter.dim() == 4 and unit == "kernel":
                parameter.data *= torch.rand(*parameter.shape[:2], 1, 1) < density
            elif parameter.dim() > 1:
                parameter.data *= torch.rand_like(parameter) < density
        return len(write(content(module.eval(), (3, 8, 8), unit), value_type))

    torch.manual_seed(0)
    whole = size(1.0)
    assert size(0.05) < 0.1 * whole < size(0.1) < 0.2 * whole
    assert size(0.1, value_type="int8") < 0.5 * size(0.1)
    assert size(0.1, "kernel") < 0.95 * size(0.1)


def test_tied_and_other_tensors_come_back():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.register_buffer("steps", torch.tensor(7))
            self.register_buffer("gone", torch.tensor([True, False]))
            self.register_buffer("fine", torch.tensor([1.0, 1e-300], dtype=torch.float64))

        def forward(self, x):
            return self.two(F.relu(self.one(x)))

    module = sparse(Tied(), (4,))
    data = write(content(module, (4,)))
    found = OpenedArchive.of(data).tensors(module.state_dict())
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())
    agree(module, data, torch.randn(3, 4))


def test_values_beyond_a_type_are_not_written():
    module = tiny()
    module[0].weight.data[0, 0] = 1e6
    with pytest.raises(OverflowError, match=r"'0\.weight' has values beyond those of float16"):
        write(content(module, (2,)), "float16")


# ---- what the C reader computes ----


class Residual(nn.Module):
    """Every way in which sums may fall."""

    def __init__(self, kind, norm=nn.BatchNorm2d):
        super().__init__()
        self.kind = kind
        self.first, self.n1 = nn.Conv2d(3, 8, 3, padding=1), norm(8)
        self.second, self.n2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.third, self.n3 = nn.Conv2d(8, 8, 1), norm(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.n1(self.first(x)))
        if self.kind == "identity":
            x = F.relu(self.n2(self.second(x)) + x)
        elif self.kind == "read again":
            x = F.relu(self.n2(self.second(x)) + x) + x
        elif self.kind == "both":
            x = F.relu(self.n2(self.second(x)) + self.n3(self.third(x)))
        elif self.kind == "of itself":
            x = self.n2(self.second(x)) + self.second(x)
        elif self.kind == "twice":
            inner = self.n2(self.second(x))
            x = x + inner + self.n3(self.third(inner))
        elif self.kind == "no norm":
            x = self.third(self.second(x) + x) + x
        elif self.kind == "itself":
            x = x + x
        return self.fc(x.mean((2, 3)))


PARTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: models.get("mlp")((1, 8, 8), 10), (1, 8, 8)),
    "norm of features": (lambda: nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3)), (6,)),
    "resnet18_small": (lambda: models.get("resnet18_small")((3, 16, 16), 10), (3, 16, 16)),
    "group norm": (lambda: models.get("resnet18_small")((3, 8, 8), 10, norm="group"), (3, 8, 8)),
    "groups of channels": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 16, 3, padding=1), nn.Flatten(), nn.Linear(4096, 3)
        ),
        (3, 16, 16),
    ),
    "strides": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 3), dilation=(2, 1)),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, groups=4, padding=2),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(12, 6, 1, stride=2, bias=False),
            nn.AvgPool2d(2, 1, padding=1, count_include_pad=False),
            nn.Flatten(),
            nn.Linear(6 * 3 * 6, 7),
        ),
        (3, 11, 13),
    ),
    "pools": (
        lambda: nn.Sequential(nn.AvgPool2d(2, padding=1), nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.ReLU(), nn.Linear(64, 2)),
        (2, 8, 8),
    ),
    **{
        f"sum, {kind}": (partial(Residual, kind), (3, 9, 7))
        for kind in ("identity", "read again", "both", "of itself", "twice", "no norm", "itself")
    },
    "sum, group norm": (lambda: Residual("both", lambda channels: nn.GroupNorm(2, channels)), (3, 9, 7)),
    "sum, norms alone": (lambda: Residual("both", lambda channels: nn.BatchNorm2d(channels, affine=False)), (3, 9, 7)),
}


@pytest.mark.parametrize("name", PARTS)
def test_c_computes_what_the_module_computes(name):
    build, shape = PARTS[name]
    for density in (0.05, 0.6):
        module = sparse(build(), shape, density)
        data = write(content(module, shape))
        for isa in ISAS:
            agree(module, data, torch.randn(17, *shape), isa)
    agree(module, data, torch.randn(1, *shape))


@pytest.mark.parametrize("name", ["resnet18_small", "groups of channels"])
def test_c_reads_whole_windows(name):
    build, shape = PARTS[name]
    module = sparse(build(), shape, 1.0)
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data *= torch.rand(*parameter.shape[:2], 1, 1) < 0.3
    for isa in ISAS:
        agree(module, write(content(module, shape, "kernel")), torch.randn(17, *shape), isa)


def test_any_number_of_samples_and_models_beside_each_other():
    module = sparse(models.get("cnn")((1, 8, 8), 4), (1, 8, 8))
    data = write(content(module, (1, 8, 8)))
    x = torch.randn(150, 1, 8, 8)
    one, other = fedrts_kernels.Model(data), fedrts_kernels.Model(data)
    whole = np.asarray(one(x.numpy())).reshape(150, 4)
    for samples in (150, 0, 16, 33, 64, 65, 1):
        for model in (one, other):
            np.testing.assert_allclose(np.asarray(model(x[:samples].numpy())).reshape(-1, 4), whole[:samples], rtol=1e-4, atol=1e-6)
    assert (one.input_shape, one.outputs) == ((1, 8, 8), 4)
    assert one.active < one.weights == sum(p.numel() for p in module.parameters() if p.dim() > 1)
    for wrong in (x.double().numpy(), x.transpose(2, 3).flip(0).numpy()[:, :, :, ::2], np.zeros((1, 7), np.float32)):
        with pytest.raises(ValueError, match="inputs must be contiguous float32"):
            one(wrong)


@pytest.mark.parametrize("coding", [coding for coding in positions.Coding if coding != positions.Coding.NONE])
def test_c_reads_positions_in_every_coding(coding, monkeypatch):
    """Whichever is the smallest: the writer is made to take this one where it can."""

    def forced(bits, shape):
        fits = positions.sizes(bits, shape).get(coding, 1 << 60) <= -(-len(bits) // 8)  # longer ones are refused
        chosen, payload = positions.encode(bits, shape, coding if fits else None)
        taken.add(chosen)
        return bytes([chosen]) + varint(len(payload)) + payload

    taken = set()
    monkeypatch.setattr(archive, "write_positions", forced)
    for density in (0.0, 0.02, 0.2, 0.9, 1.0):
        module = sparse(nn.Sequential(nn.Conv2d(5, 9, 3), nn.Flatten(), nn.Linear(9 * 36, 7)), (5, 8, 8), density, seed=int(coding))
        agree(module, write(content(module, (5, 8, 8))), torch.randn(3, 5, 8, 8))
        data = write(content(sparse(models.get("cnn")((3, 8, 8), 8), (3, 8, 8), density / 8), (3, 8, 8), "block:2×4"))
        module = models.get("cnn")((3, 8, 8), 8)
        module.load_state_dict(OpenedArchive.of(data).tensors(module.state_dict()))
        agree(module.eval(), data, torch.randn(3, 3, 8, 8))
    assert coding in taken


# ---- damage ----


def a_model():
    """An archive with every kind of operation and several codings of positions, and its inputs' shape."""
    module = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2),
        Adds(), nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    return content(sparse(module, (2, 8, 8), 0.2), (2, 8, 8), "block:2×2"), (2, 8, 8)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return F.relu(self.conv(x) + x)


def state_of(held):
    return {name: part.tensor for part in held.tensors for name in part.names}


def test_a_file_that_is_cut_off_is_refused_wherever():
    held, _ = a_model()
    data = write(held)
    for length in range(len(data)):
        for cut in (data[:length], sealed(data[: max(0, length - 4)])):  # with a checksum of its own it must be told by what is missing
            with contextlib.suppress(WireError):  # where only operations are missing, which Python does not read, it is not told
                OpenedArchive.of(cut).tensors(state_of(held))
            with pytest.raises(ValueError, match=r"^(it |its )"):
                fedrts_kernels.Model(cut)
    with pytest.raises(ValueError, match="bytes too many"):
        fedrts_kernels.Model(sealed(data[:-4] + b"\0"))


def damaged(data, number, seed=0):
    """So many copies of an archive with a few other bytes and a right checksum."""
    choose = random.Random(seed)
    for _ in range(number):
        body = bytearray(data[:-4])
        for _ in range(choose.choice((1, 1, 1, 2, 4))):
            body[choose.randrange(5, len(body))] = choose.choice((0, 1, 2, 127, 128, 255, choose.randrange(256)))
        if choose.random() < 0.2:
            at = choose.randrange(5, len(body))
            del body[at : at + choose.randrange(1, 9)]
        yield sealed(bytes(body))


def survives(data, held, shape):
    """Neither reader may do worse than to refuse; what is accepted may be run."""
    with contextlib.suppress(WireError):
        OpenedArchive.of(data).tensors(state_of(held))
    try:
        model = fedrts_kernels.Model(data)
    except ValueError as error:
        assert_told(error, "it ", "its ", "operation ", "there is not enough memory")
        return False
    if model.input_shape == shape:
        try:
            model(np.ones((1, *shape), np.float32))
        except ValueError as error:
            assert_told(error, "there is not enough memory")
    return True


def assert_told(error, *beginnings):
    assert str(error).startswith(beginnings), error


@pytest.mark.parametrize("number", [400, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_flipped_bytes_do_no_harm(number):
    """Under the sanitizers (`make sanitize`) this would end the process at the first wrong access."""
    held, shape = a_model()
    data = write(held, "int8")
    accepted = sum(survives(changed, held, shape) for changed in damaged(data, number))
    assert 0 < accepted < number


def test_gaps_of_inactive_links_cannot_leave_more_active_ones_than_there_are(monkeypatch):
    """1,096 of 4,096 links are listed as inactive, and the first of them is the last one: all others would be active."""
    usual, bits = write_positions, bytearray(512)
    bits[-1] = 128
    payload = varint(3000) + b"\0" + bytes(bits)

    def lies(active, shape):
        return bytes([7]) + varint(len(payload)) + payload if tuple(shape) == (64, 64) else usual(active, shape)

    held = content(sparse(nn.Sequential(nn.Linear(64, 64)), (64,), density=0.8), (64,))
    monkeypatch.setattr(archive, "write_positions", lies)
    with pytest.raises(ValueError, match="it has gaps that do not fit"):
        fedrts_kernels.Model(write(held))


def test_one_changed_byte_is_told_by_the_checksum():
    data = bytearray(write(a_model()[0]))
    data[len(data) // 2] ^= 1
    with pytest.raises(WireError, match="checksum"):
        OpenedArchive.of(bytes(data))
    with pytest.raises(ValueError, match="checksum"):
        fedrts_kernels.Model(bytes(data))


def test_what_cannot_be_is_refused_by_name():
    held, _ = a_model()
    good = held.stages

    def refused(words, **changes):
        with pytest.raises(ValueError, match=words):
            fedrts_kernels.Model(write(ArchiveContent(**{**vars(held), **changes})))

    refused("has no operations: the model has parts that the kernels do not know", stages=())
    refused("its last operation does not give its outputs", outputs=6)
    refused("its last operation does not give its outputs", stages=good[:-1])
    refused("weights of another shape", input_shape=(3, 8, 8))
    refused("its inputs are no images", input_shape=(2, 8))
    refused("impossible shape", input_shape=(2, 0, 8))
    refused("more values than fit", input_shape=(2, 2**14, 2**13))
    refused("normalises channels that inputs do not have", normalisation=([1.0], [0.0]))
    with pytest.raises(WireError, match="is missing"):
        OpenedArchive.of(write(held)).tensors({**state_of(held), "more": torch.zeros(1)})
    with pytest.raises(WireError, match="the model has no tensor"):
        OpenedArchive.of(write(held)).tensors({"other": torch.zeros(1)})
    with pytest.raises(WireError, match="of shape"):
        OpenedArchive.of(write(held)).tensors({name: torch.zeros(1) for name in state_of(held)})


# ---- the program ----


def run(*words, stdin=b"", code=0):
    command = [str(fedrts_kernels.PROGRAM), *map(str, words)]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1"})
    assert done.returncode == code, done.stderr.decode()
    if code:
        assert done.stderr.decode().count("\n") == 1
        assert done.stderr.startswith(b"error: ")
        return done.stderr.decode()
    assert not done.stderr
    return done.stdout.decode()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model's file, the module, inputs as .npy and as tensor."""
    folder = tmp_path_factory.mktemp("exported")
    module = sparse(models.get("cnn")((3, 8, 8), 10), (3, 8, 8))
    (folder / "model.frts").write_bytes(write(content(module, (3, 8, 8), normalisation=([0.1, 0.2, 0.3], [-1.0, 0.0, 1.0]))))
    x = torch.randn(37, 3, 8, 8)
    np.save(folder / "x.npy", x.numpy())
    with torch.no_grad():
        return folder / "model.frts", folder / "x.npy", x, module(x).numpy()


def test_the_program_predicts_from_files_and_standard_input(exported, tmp_path):
    model, file, x, wanted = exported
    run(model, file, "--out", tmp_path / "y.npy")
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), wanted, rtol=1e-4, atol=1e-5)
    run(model, file, "--out", tmp_path / "classes.npy", "--classes", "--batch", 5)
    assert np.load(tmp_path / "classes.npy").tolist() == wanted.argmax(1).tolist()
    for given in ({"stdin": x.numpy().tobytes()}, {"stdin": file.read_bytes()}):
        lines = run(model, "-", **given).splitlines()
        np.testing.assert_allclose(np.array([line.split() for line in lines], np.float32), wanted, rtol=1e-4, atol=1e-5)
        assert run(model, "--classes", "--isa", "portable", **given).split() == [str(label) for label in wanted.argmax(1)]
    assert run(model, stdin=b"") == ""
    assert "inputs of 3×8×8 numbers, normalised from pixels\n10 outputs\n" in run(model, "--info")
    assert "usage: run MODEL" in run("--help")


def test_the_program_normalises_stored_pixels(exported, tmp_path):
    model, *_ = exported
    pixels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    scale, shift = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1)
    wanted = run(model, stdin=(pixels * scale + shift).numpy().tobytes())
    assert run(model, tmp_path / "pixels.npy") == wanted
    assert run(model, "--uint8", stdin=pixels.numpy().tobytes()) == wanted


def test_the_program_times_itself(exported):
    model, file, *_ = exported
    first, second, peak = run(model, file, "--bench", stdin=b"3\n2\n0\n").split()
    assert 0 < float(first) < 5
    assert 0 < float(second) < 5
    assert int(peak) > 500


def test_the_program_says_in_one_line_what_is_wrong(exported, tmp_path):
    model, file, x, _ = exported

    def saved(array, name="wrong.npy"):
        np.save(tmp_path / name, array)
        return tmp_path / name

    cut = tmp_path / "cut.npy"
    cut.write_bytes(file.read_bytes()[:-8])
    assert "no/such: No such file or directory" in run("no/such", code=2)
    assert "no archive of fedrts export --format sparse" in run(file, code=2)
    assert "its checksum is wrong" in run(saved_bytes(tmp_path, model.read_bytes()[:-9] + bytes(9)), code=2)
    assert "no/such.npy: No such file" in run(model, "no/such.npy", code=2)
    assert "its samples have 64 numbers, the model reads 192" in run(model, saved(np.zeros((2, 8, 8), np.float32)), code=2)
    assert "neither float32 nor uint8" in run(model, saved(x.double().numpy()), code=2)
    assert "Fortran's order" in run(model, saved(np.asfortranarray(x.numpy())), code=2)
    assert "ends within a sample" in run(model, cut, code=2)
    assert "ends within a sample" in run(model, stdin=bytes(193 * 4), code=2)
    assert "no such option" in run(model, "--what", code=2)
    assert "a number from 1 to 4096" in run(model, "--batch", "many", code=2)
    assert "no such instruction set" in run(model, "--isa", "neon", code=2)
    assert "it needs an INPUT file" in run(model, "--bench", code=2)
    for header in (b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff{", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", b"\x93NUMPY\x01\x00\x02\x00{}"):
        run(model, stdin=header, code=2)


def saved_bytes(folder, data):
    (folder / "model.frts").write_bytes(data)
    return folder / "model.frts"


def test_damaged_headers_of_npy_files_do_no_harm(exported):
    model, file, *_ = exported
    data, choose = file.read_bytes(), random.Random(1)
    for _ in range(20):
        changed = bytearray(data)
        changed[choose.randrange(6, 128)] = choose.randrange(256)
        done = subprocess.run([fedrts_kernels.PROGRAM, model], input=bytes(changed), capture_output=True, check=False)
        assert done.returncode in (0, 2), done.stderr


def test_about_is_json_whatever_it_holds():
    held, _ = a_model()
    about = {"model": "ü" * 200, "classes": 3, "nested": {"a": [1, None]}}
    assert OpenedArchive.of(write(ArchiveContent(**{**vars(held), "about": about}))).about == json.loads(json.dumps(about))
