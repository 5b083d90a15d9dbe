"""What it takes to make and read whole messages of resnet18's size, against `torch.save` of the dense model in the same run.

    python benchmarks/codec.py [--density 0.2] [--repeat 9] [--threads 1]

First an upload (values on the mask) and a download to a client that holds no mask (positions and values), float32 and lossless. Then
uploads in every type of rounded values, from a client's weights to bytes (rounding included) and from bytes to the values that the
server adds up. Prints two tables; benchmarks/results/codec.md is one such run.
"""

from __future__ import annotations

import argparse
import io
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import torch

from fedrts import __version__, methods
from fedrts.methods.contract import Setup
from fedrts.sparse import random
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.fields import Frame, Values
from fedrts.wire.value_types import RoundedType
from server import resnet18_layout, seconds

AIM = 4
CODING_AIM = 1.5
"""Times int8, for int4."""


def medians(works: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Seconds of each, in turns; the first turn warms up."""
    turns = [[seconds(work) for work in works] for _ in range(repeat + 1)][1:]
    return [statistics.median(turn) for turn in zip(*turns, strict=True)]


class Upload:
    """A client's weights on the wire in some type, and back."""

    def __init__(self, type: RoundedType, frame: Frame, weights: torch.Tensor) -> None:
        self.fields, self.frame, self.weights = {"weights": Values(type=type)}, frame, weights
        self.data = self.send()

    def send(self) -> bytes:
        message = {"weights": self.fields["weights"].take({"weights": self.weights}, self.frame)}
        header = Header(Kind.UPLOAD, bytes.fromhex(self.frame.layout.fingerprint), self.frame.mask.fingerprint, 0, 0, 0)
        return codec.encode(header, self.fields, message, self.frame)

    def receive(self) -> None:
        _, reader = codec.open_upload(self.data, self.frame)
        self.fields["weights"].open(codec.read_fields(reader, self.fields, self.frame)["weights"], self.frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.2)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)

    layout, fields = resnet18_layout(), {"weights": Values()}
    weights = torch.randn(layout.length)
    setup = Setup(layout, weights, (3, 32, 32), rng=lambda purpose: random.key(0, purpose))
    frame = Frame(layout, methods.get("random")(density=options.density).begin(setup).mask)
    message = {"weights": fields["weights"].take({"weights": weights}, frame)}

    def encode(kind: Kind) -> bytes:
        header = Header(kind, bytes.fromhex(layout.fingerprint), frame.mask.fingerprint, round=0, exchange=0, client=0)
        return codec.encode(header, fields, message, frame)

    def read_upload() -> None:
        _, reader = codec.open_upload(upload, frame)
        codec.read_fields(reader, fields, frame)

    def read_download() -> None:
        _, mask, reader = codec.open_download(download, layout, None)
        codec.read_fields(reader, fields, Frame(layout, mask))

    def save() -> io.BytesIO:
        file = io.BytesIO()
        torch.save(weights, file)
        return file

    upload, download = encode(Kind.UPLOAD), encode(Kind.DOWNLOAD)
    works = [save, lambda: encode(Kind.UPLOAD), read_upload, lambda: encode(Kind.DOWNLOAD), read_download]
    times = medians(works, options.repeat)
    labels = ["`torch.save` of the dense model", "upload, encode", "upload, decode", "download, encode", "download, decode"]
    lengths = [save().tell(), len(upload), len(upload), len(download), len(download)]

    print(
        f"fedrts {__version__}, torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, two cores of a shared virtual machine; {layout.links:,} links, density {options.density}; "
        f"{options.threads} thread(s); medians of {options.repeat} turns\n"
    )
    print(f"| message | MB | ms | × torch.save (aim: at most {AIM}) |\n| --- | ---: | ---: | ---: |")
    for label, length, taken in zip(labels, lengths, times, strict=True):
        print(f"| {label} | {length / 1e6:.2f} | {taken * 1e3:.1f} | {taken / times[0]:.2f} |")

    reference = frame.mask.compact(weights)
    client = frame.mask.expand(reference + 0.1 * torch.randn(len(reference)))
    changes = Frame(layout, frame.mask, key=1, reference=reference)
    uploads = {type: Upload(type, changes, client) for type in get_args(RoundedType)}
    times = medians([work for upload in uploads.values() for work in (upload.send, upload.receive)], options.repeat)
    whole = times[0] + times[1]
    print(f"\n| upload | MB | bits a value | ms to send | ms to receive | × int8 (aim for int4: at most {CODING_AIM}) |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for type, sent, received in zip(uploads, times[::2], times[1::2], strict=True):
        length = len(uploads[type].data)
        bits = 8 * length / len(reference)
        print(f"| {type} | {length / 1e6:.2f} | {bits:.2f} | {sent * 1e3:.1f} | {received * 1e3:.1f} | {(sent + received) / whole:.2f} |")


if __name__ == "__main__":
    main()
