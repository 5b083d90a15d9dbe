"""What a node's process holds while its client trains sparsely: measured by the system, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from fedrts.client.envelope import encode_order
from fedrts.client.order import Order
from fedrts.flower.deployment import introduction
from fedrts.programs import library
from helping import instruction_sets
from linkhere import experiment

NODE = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from fedrts.flower.host import ANY, Host, Limits
from fedrts.flower.site import Site

def resident(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024

def settled():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    return resident("VmRSS")

def joined(folder):
    facts = json.loads((folder / "facts.json").read_text("utf-8"))
    return Site.of(Host(clients=[0], accept=[ANY], limits=Limits(1, 1, 0, 0)), facts["experiment"], facts)

def answered(site, file):
    facts, replies = site.answer({0: file.read_bytes()})
    assert replies, facts

torch.set_num_threads(1)
small, large, dense_copies = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tiny = joined(small)
answered(tiny, small / "outer")
answered(tiny, small / "inner")
before = settled()
site = joined(large)
assert site.run.bench.program is not None
answered(site, large / "outer")  # which needs dense gradients, and leaves nothing of them behind
copies = [torch.ones(site.run.layout.length) for _ in range(dense_copies)]
held = settled() - before
answered(site, large / "inner")
peak = resident("VmHWM") - before
found = [t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.is_floating_point()]
print(json.dumps({"held": held, "peak": peak, "largest": max(found), "vector": 4 * site.run.layout.length}))
"""


def asked(folder: Path, model: str, **options: Any) -> Path:
    """What a server tells a node of an experiment, and its orders of an outer and of an inner round, as files."""
    folder.mkdir()
    run = experiment(
        "fedrts",
        model=model,
        data="digits",
        model_options=options,
        density=0.1,
        recipe="paper",
        clients={"total": 20, "per_round": 3, "partition": "iid", "min_size": 1},
        engine={"kernel": "sparse"},
        train={"epochs": 1, "batch_size": 16, "momentum": 0.9},
    )
    state = run.method.begin(run.setup)
    for name, index, held in (("outer", 0, None), ("inner", 1, state.mask)):
        current = run.plan.round(index, state.mask)
        order = Order.of(run.plan.exchanges(current)[0], current, run.layout, state, 0)
        (folder / name).write_bytes(encode_order(order, 0, held))
    (folder / "facts.json").write_text(json.dumps(introduction(run)), "utf-8")
    return folder


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """Return the orders of a small model and of resnet18 (11 million links), at density 0.1."""
    folder = tmp_path_factory.mktemp("orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.OFF, "1")
        yield asked(folder / "small", "resnet18_small", width=8), asked(folder / "large", "resnet18", stem="cifar")


def measured(orders, dense_copies: int) -> dict[str, int]:
    """Bytes beyond what the process took with a small model."""
    command = [sys.executable, "-c", NODE, *map(str, orders), str(dense_copies)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux" or not instruction_sets(), reason="needs Linux's /proc and the kernels")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dense_copies", [0, 1])
def test_a_node_that_trains_sparsely_holds_no_dense_vector(orders, dense_copies):
    """Dense, it would hold model, received model, gradient and momentum: four vectors of 45 MB. One is more than the measure allows."""
    found = measured(orders, dense_copies)
    assert (found["largest"] >= found["vector"]) is bool(dense_copies)
    assert (found["peak"] >= 2.5 * found["vector"]) is bool(dense_copies)
