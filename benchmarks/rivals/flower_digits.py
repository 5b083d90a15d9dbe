"""Federated averaging of a small MLP on handwritten digits in Flower's simulation (Ray), through its public interface.

    pip install -r benchmarks/rivals/requirements-flower.txt
    python benchmarks/rivals/flower_digits.py

20 clients with equal parts of the data, 10 a round, 5 epochs, batches of 16, SGD 0.2: an app as Flower's documentation has it, with its
FedAvg strategy, one core a client. Rounds without evaluation are timed, start-up not. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from rivals.digits_client import BATCH, CLIENTS, EPOCHS, PER_ROUND, local, parts
from rivals.laps import Laps, not_installed, say
from rivals.nets import perceptron


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long rounds are timed")
    options = parser.parse_args()
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))  # for Ray's workers
    try:
        import flwr
        import ray  # noqa: F401
        from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import Grid, ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation
    except ImportError as error:
        not_installed("flower", error)
    logging.getLogger("flwr").setLevel(logging.ERROR)

    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = perceptron((1, 8, 8), 10)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = parts()[int(context.node_config["partition-id"])]
        began = time.perf_counter()
        local(model, x, y)
        metrics = {"num-examples": len(y), "seconds": time.perf_counter() - began}
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(content=RecordDict(content), reply_to=message)

    busy: list[float] = []
    laps = Laps("cpu", seconds=options.seconds)
    samples = PER_ROUND * EPOCHS * (len(parts()[0][1]) // BATCH * BATCH)

    class Enough(Exception):  # noqa: N818
        pass

    class Timed(FedAvg):
        """A round is over when the strategy has the mean."""

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            if failed := [reply for reply in replies if reply.has_error()]:
                raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed: {failed[0].error.reason}")
            found = super().aggregate_train(server_round, replies)
            busy.append(sum(float(reply.content["metrics"]["seconds"]) for reply in replies))
            if laps.lap(samples):
                raise Enough
            return found

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=PER_ROUND / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        laps.start()
        try:
            strategy.start(grid=grid, initial_arrays=ArrayRecord(perceptron((1, 8, 8), 10).state_dict()), num_rounds=10_000)
        except Enough:
            cores = len(os.sched_getaffinity(0))
            say({"who": f"Flower {flwr.__version__} simulation", **laps.result(), "training_seconds": busy[laps.warm_up :], "cores": cores})
        except RuntimeError as error:
            say({"error": str(error).partition("\n")[0]})

    run_simulation(server, client, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


if __name__ == "__main__":
    main()
