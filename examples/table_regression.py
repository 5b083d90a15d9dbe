"""A table with a column for the client: how diabetes progresses, of 442 patients in six clinics.

python examples/table_regression.py
"""

import sys

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_diabetes

import fedrts


def patients() -> pd.DataFrame:
    """Scikit-learn's table, with words for the sex and a clinic for everybody: patients of one age tend to go to the same."""
    data = load_diabetes()
    frame = pd.DataFrame(data.data, columns=data.feature_names)
    frame["sex"] = np.where(frame["sex"] > 0, "m", "f")
    frame[["age", "bmi", "bp"]] *= 20  # the columns of numbers have a norm of 1
    frame[[f"s{number}" for number in range(1, 7)]] *= 20
    older = frame["age"] + np.random.default_rng(0).normal(0, 1, len(frame))
    frame["clinic"] = pd.qcut(older, 6, labels=["Aare", "Birs", "Emme", "Inn", "Limmat", "Reuss"]).astype(str)
    frame["progression"] = data.target
    return frame


def main(short: bool = False) -> None:
    """Train at a third of the weights; a fifth of every clinic's patients are held out."""
    torch.manual_seed(0)
    columns = 9 + 2  # numbers, and one for each word
    result = fedrts.train(
        model=fedrts.models.get("tabular")((columns,), 1),
        clients=patients(),
        client="clinic",
        target="progression",
        test=0.2,
        task="regression",
        method="fedrts",
        density=0.35,
        rounds=10 if short else 40,
        train={"lr": 0.1, "clip": 1.0, "epochs": 2, "batch_size": 16},
    )
    found = result.summary
    print(f"MAE {found['mae']:.1f} RMSE {found['rmse']:.1f} R² {found['r2']:.3f} density {found['density']:.3f}")
    assert found["r2"] > (0.3 if short else 0.4)  # ordinary least squares on all patients at once: 0.5


if __name__ == "__main__":
    main(short="--short" in sys.argv)
