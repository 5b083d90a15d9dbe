"""Do clients side by side come to what clients one after the other come to? Every method, three families of models, unequal clients.

    python benchmarks/agreement.py [--device cuda] [--method fedrts]…

In float64 both engines must have the same masks in every round and weights within 1e-9; in float32 the gradients of one step must be within
5e-3, relative. The definitions are those of tests/agree/test_engines.py (fedrts.testing.agreement), here on any device and, on CUDA, for
both kernels: vectorised for all methods, streamed for some. Prints a table; exits with 1 where anything disagrees.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch

from fedrts import __version__, methods
from fedrts.engines.kernels import Objective, Streamed, Vectorised
from fedrts.testing.agreement import FAMILIES, GRADIENTS_WITHIN, MakeKernel, agree, both, gradient_difference, largest_difference, unequal

STREAMED = ("fedavg", "fedrts", "feddst", "fedmef")
"""Methods that together use every step and every kind of mask."""


def kernels(device: str) -> dict[str, MakeKernel]:
    def streamed(objective: Objective) -> Streamed:
        return Streamed(objective, torch.device(device))

    return {"vectorised": Vectorised, **({"streamed": streamed} if device.startswith("cuda") else {})}


def compared(method: str, model: str, device: str, make_kernel: MakeKernel) -> tuple[str, str]:
    """The largest difference of weights in float64, and the verdict."""
    first, second = both(unequal(method, model, device=device), make_kernel=make_kernel)
    difference = f"{largest_difference(first, second):.1e}"
    try:
        agree(first, second)
    except AssertionError as error:
        return difference, "DISAGREE: " + " ".join(str(error).split())[:120]
    return difference, "agree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", action="append", choices=methods.names(), help="only this one; may be repeated")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "There is a performance drop")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if options.device == "cpu":
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "CPU"
    print(f"fedrts {__version__}, torch {torch.__version__}, {where}\n")
    started, failures = time.perf_counter(), 0

    print("| model | kernel | one step's gradients in float32, relative difference | verdict |\n| --- | --- | ---: | --- |")
    for model, family in FAMILIES.items():
        for name, make_kernel in kernels(options.device).items():
            relative = gradient_difference(unequal("fedavg", model, device=options.device), make_kernel)
            fits = relative < GRADIENTS_WITHIN
            failures += not fits
            print(f"| {model} ({family}) | {name} | {relative:.1e} | {'agree' if fits else 'DISAGREE'} |", flush=True)

    print("\n| method | model | kernel | largest difference of weights in float64 | verdict |\n| --- | --- | --- | ---: | --- |")
    for method in options.method or methods.names():
        for model, family in FAMILIES.items():
            for name, make_kernel in kernels(options.device).items():
                if name == "streamed" and method not in STREAMED:
                    continue
                largest, verdict = compared(method, model, options.device, make_kernel)
                failures += verdict != "agree"
                print(f"| {method} | {model} ({family}) | {name} | {largest} | {verdict} |", flush=True)

    print(f"\n{failures or 'no'} disagreements; {time.perf_counter() - started:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
