"""Federated averaging as everybody writes it: client after client from the server's state dict, SGD on minibatches, then the mean.

    python benchmarks/rivals/plain.py --data cifar10 --model resnet18 [--device cuda] [--precision float32|tf32|bf16]

Eager PyTorch. To its favour, all data lie on the device, batches are gathered and augmented there, and nothing is copied to the host within
a round. It trains the clients that our engines train, on as many full batches. Rounds without evaluation are timed. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from fedrts import config
from fedrts.runs.build import Assembled, assemble
from rivals.laps import Laps, say


def played(run: Assembled, precision: str) -> Iterator[int]:
    """Rounds without end; each yields the number of samples that it trained on."""
    module, held, training = run.module.train(), run.data, run.training
    device = next(module.parameters()).device
    rows = [part.to(device) for part in run.rows]
    server = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for index in range(run.plan.rounds):
        clients = run.plan.sample(index)
        total = sum(run.plan.samples[client] for client in clients)
        mean = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in server.items()}
        samples = 0
        for client in clients:
            module.load_state_dict(server)
            optimizer = torch.optim.SGD(module.parameters(), lr=training.lr)
            for _ in range(training.epochs):
                order = rows[client][torch.randperm(len(rows[client]), device=device)]
                for batch in order[: len(order) // training.batch_size * training.batch_size or len(order)].split(training.batch_size):
                    x, y = held.training_batch(batch, key=samples)
                    optimizer.zero_grad()
                    with autocast(device, precision):
                        loss = held.task.loss(module, x, y)
                    loss.backward()
                    optimizer.step()
                    samples += len(batch)
            for name, tensor in module.state_dict().items():
                mean[name] += tensor * (run.plan.samples[client] / total)
        server = {name: mean[name].to(tensor.dtype) for name, tensor in server.items()}
        yield samples


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def timed(settings: config.Tree, precision: str, laps: Laps) -> dict[str, object]:
    """Laps of the experiment with these settings."""
    run = assemble(config.resolve(settings, {"engine": {"name": "serial"}, "device": laps.device}))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    laps.start()
    for samples in played(run, precision):
        if laps.lap(samples):
            break
    return laps.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default="float32")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long rounds are timed")
    options = parser.parse_args()
    settings = {"data": options.data, "model": options.model, "method": "fedavg"}
    say({"who": "plain loop", **timed(settings, options.precision, Laps(options.device, 1, 3, options.seconds))})


if __name__ == "__main__":
    main()
