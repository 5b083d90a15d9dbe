"""One way to run a trained model, in a process of its own: `python -m fedrts.export.way WAY MODEL INPUTS OUTPUTS [--allow PATH]…`.

Writes what the model makes of the inputs (both .npy). Then, like the program in C with --bench, it answers every number N on standard input
by the mean time of N runs in seconds, and 0 by the most memory that it took, in KiB. Each way imports what it needs and nothing else.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Outputs = Callable[[], Any]


def by_kernels(file: Path, x: NDArray[Any], allowed: Sequence[str]) -> Outputs:
    """Run an archive in our kernels."""
    from fedrts_kernels import Model

    model = Model(file.read_bytes())
    return lambda: np.asarray(model(x), np.float32).reshape(len(x), -1)


def by_torch(file: Path, x: NDArray[Any], allowed: Sequence[str]) -> Outputs:
    """Run an archive as a dense module in PyTorch; for images, in the faster of its two layouts."""
    import torch

    import fedrts

    torch.set_num_threads(1)
    module, inputs = fedrts.load(file, trust=list(allowed)), torch.from_numpy(x)

    def call(module: torch.nn.Module, inputs: torch.Tensor) -> Any:
        with torch.inference_mode():
            return module(inputs).numpy()

    if inputs.dim() != 4:
        return partial(call, module, inputs)
    calls = []
    for layout in (torch.contiguous_format, torch.channels_last):
        copied = copy.deepcopy(module).to(memory_format=layout)  # type: ignore[call-overload]
        calls.append(partial(call, copied, inputs.contiguous(memory_format=layout)))
        calls[-1]()
    return min(calls, key=lambda one: mean_time(one, 5))


def by_onnxruntime(file: Path, x: NDArray[Any], allowed: Sequence[str]) -> Outputs:
    """Run an ONNX file in onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"input": x})[0]


WAYS = {"kernels": by_kernels, "torch": by_torch, "onnxruntime": by_onnxruntime}


def mean_time(call: Outputs, runs: int) -> float:
    """Return mean seconds of processor time of this thread."""
    begun = time.thread_time()
    for _ in range(runs):
        call()
    return (time.thread_time() - begun) / runs


def peak() -> int:
    """Return the peak memory of this process in KiB; `getrusage` may report that of its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(words: Sequence[str]) -> None:
    """Answer numbers until 0 or the end of input."""
    way, file, inputs, outputs, *flags = words
    call = WAYS[way](Path(file), np.load(inputs), flags[1::2])
    np.save(outputs, call())
    print("ready", flush=True)
    for line in sys.stdin:
        if int(line) == 0:
            break
        call()  # another process had the cache
        print(f"{mean_time(call, int(line)):.9f}", flush=True)
    print(peak())


if __name__ == "__main__":
    main(sys.argv[1:])
