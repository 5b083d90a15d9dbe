"""pfl-research's own CIFAR-10 benchmark through pfl's public interface: federated averaging, 1000 users × 50 images, 50 users a round.

    pip install -r benchmarks/rivals/requirements-pfl.txt
    python benchmarks/rivals/pfl_cifar10.py --data-dir DIR [--device cuda] [--dropout]

The settings are those of its benchmarks/image_classification/configs/baseline.yaml: batches of 10, one local epoch, SGD 0.1, users
weighted alike, all data on the device, float32 (without TF32). Rounds without evaluation are timed. pfl runs one process a GPU.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rivals.laps import Laps, exactly_float32, not_installed, say
from rivals.nets import two_conv

USERS, COHORT, BATCH, RATE = 1000, 50, 10, 0.1
NEVER = 10**9


def cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Training images `[50000, 3, 32, 32]`, every channel normalised, and labels, of the binary release."""
    files = [folder / "cifar-10-batches-bin" / f"data_batch_{number}.bin" for number in range(1, 6)]
    rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    images = rows[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32)
    mean, std = (getattr(images, name)(axis=(0, 2, 3), keepdims=True) for name in ("mean", "std"))
    return (images - mean) / std, rows[:, 0].astype(np.int64)


class Classifier(nn.Module):
    """A model with the two methods that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, object]:
        from pfl.metrics import Weighted

        self.train(not eval)
        with torch.no_grad():
            return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(x))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDRTS_DATA", "~/.cache/fedrts"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dropout", action="store_true", help="with the dropout that pfl's own CNN has")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long rounds are timed")
    parser.add_argument("--users-a-round", type=int, default=COHORT)
    options = parser.parse_args()
    os.environ["PFL_PYTORCH_DEVICE"] = options.device
    try:
        import pfl
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByUser
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.callback.base import TrainingProcessCallback
        from pfl.data import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Metrics
        from pfl.model.pytorch import PyTorchModel
    except ImportError as error:
        not_installed("pfl", error)
    logging.disable(logging.INFO)
    exactly_float32()
    torch.manual_seed(0)
    np.random.seed(0)

    images, labels = cifar10(options.data_dir.expanduser())
    order = np.random.permutation(len(labels))
    x, y = (torch.from_numpy(array[order]).to(options.device) for array in (images, labels))
    size = len(y) // USERS
    users = {user: (x[user * size : (user + 1) * size], y[user * size : (user + 1) * size]) for user in range(USERS)}
    dataset = FederatedDataset.from_slices(users, get_user_sampler("random", range(USERS)))

    net = Classifier(two_conv((3, 32, 32), 10, dropout=float(options.dropout))).to(options.device)
    model = PyTorchModel(model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    laps = Laps(options.device, seconds=options.seconds)

    class Timing(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            return laps.lap(options.users_a_round * size), Metrics()

    laps.start()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=NEVER, evaluation_frequency=NEVER, train_cohort_size=options.users_a_round, val_cohort_size=None
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[Timing()],
        send_metrics_to_platform=False,
    )
    say({"who": f"pfl {pfl.__version__}" + (" with its dropout" if options.dropout else ""), **laps.result()})


if __name__ == "__main__":
    main()
