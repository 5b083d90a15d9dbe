"""Compile the library with the machine's C compiler: once for every instruction set, linked together; and the program `run` beside it.

    python -m fedrts_kernels [--sanitize] [--out FILE]

Needs nothing but Python and `$CC`, `cc`, `gcc` or `clang`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libfedrts_kernels.so"
PROGRAM = "run"
"""Predicts with exported models; lies beside the library."""
ISAS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"],
}
"""Flags by instruction set; all but the first are for x86."""
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wextra"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]


class BuildError(Exception):
    """There is no library, and why."""


def compiler() -> list[str]:
    """The command of a C compiler."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C compiler (cc, gcc or clang)")


def build(out: Path, sanitize: bool = False) -> None:
    """Compile the library into the file `out`, and the program beside it."""
    command, more = compiler(), SANITIZERS if sanitize else []
    x86 = _builds_for(command).startswith(("x86_64", "amd64"))
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for isa, flags in ISAS.items():
            if isa == "portable" or x86:
                objects.append(f"{folder}/{isa}.o")
                source = str(HERE / "kernels.c")
                _run([*command, *FLAGS, *more, *flags, f"-DENTRY=fedrts_run_{isa}", "-c", source, "-o", objects[-1]])
        for name in ("dispatch", "archive", "model", "run"):
            objects.append(f"{folder}/{name}.o")
            told = ["-DWITH_X86"] if x86 else []
            _run([*command, *FLAGS, *more, *told, "-c", str(HERE / f"{name}.c"), "-o", objects[-1]])
        library, program = f"{folder}/{LIBRARY}", f"{folder}/{PROGRAM}"
        _run([*command, *more, "-shared", "-o", library, *objects[:-1], "-lm"])
        _run([*command, *more, "-o", program, *objects, "-lm"])
        out.parent.mkdir(parents=True, exist_ok=True)
        for made, target in ((library, out), (program, out.with_name(PROGRAM))):
            shutil.copy(made, f"{target}.new")  # with the right to be run
            os.replace(f"{target}.new", target)


def _builds_for(command: list[str]) -> str:
    """The machine that a compiler builds for: `CC=aarch64-linux-gnu-gcc` is for another than this."""
    try:
        done = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C compiler does not start: {error}") from error
    return (done.stdout.strip() or platform.machine()).lower()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C compiler does not start: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise BuildError(f"the C compiler fails: {said}")


def main() -> None:
    """`python -m fedrts_kernels`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--out", type=Path, default=HERE / LIBRARY, metavar="FILE")
    options = parser.parse_args()
    try:
        build(options.out, options.sanitize)
    except BuildError as error:
        sys.exit(f"fedrts-kernels: {error}: models compute densely")
    print(options.out)
