"""What it takes to make and read whole messages of resnet18's size, against `torch.save` of the dense model in the same run.

    python benchmarks/codec.py [--density 0.2] [--repeat 9] [--threads 1]

An upload (values on the mask) and a download to a client that holds no mask (positions and values), float32 and lossless.
Prints a table; benchmarks/results/codec.md is one such run.
"""

from __future__ import annotations

import argparse
import io
import platform
import statistics

import numpy as np
import torch

from fedrts import __version__, methods
from fedrts.methods.contract import Setup
from fedrts.sparse import random
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.fields import Frame, Values
from server import resnet18_layout, seconds

AIM = 4


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
    turns = [[seconds(work) for work in works] for _ in range(options.repeat + 1)][1:]  # the first one warms up
    times = [statistics.median(turn) for turn in zip(*turns, strict=True)]
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


if __name__ == "__main__":
    main()
