"""Early stopping, and MLflow beside it: a run that ends when it learns no more, with its best model and all curves in a local store.

`pip install 'fedrts[mlflow]'`, then `python examples/early_stopping_mlflow.py`. Look at the store with the full MLflow:
`mlflow ui --backend-store-uri sqlite:///mlflow.db`. With `--short` it plays few rounds.
"""

import sys
import tempfile
from pathlib import Path

import mlflow
import torch

import fedrts
from fedrts.callbacks import Callback, EarlyStopping, MLflow, OuterView, RoundView

ROUNDS, PATIENCE = (8, 2) if "--short" in sys.argv else (150, 20)


class Busiest(Callback):
    """A hook of one's own: which layer's links move most?"""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}

    def on_outer(self, outer: OuterView) -> None:
        for name, mask in outer.after.items():
            self.moved[name] = self.moved.get(name, 0) + int((mask & ~outer.before[name]).sum())

    def on_round(self, round: RoundView) -> None:
        if round.metrics.get("loss", 0.0) > 100:
            round.stop("the loss explodes")


with tempfile.TemporaryDirectory() as scratch:
    store, out, busiest = f"sqlite:///{scratch}/mlflow.db", Path(scratch, "run"), Busiest()
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.create_experiment("digits", artifact_location=Path(scratch, "artefacts").as_uri())
    result = fedrts.run(
        data="digits",
        density=0.2,
        rounds=ROUNDS,
        epochs=2,
        data_options={"validation": 0.1},  # the split that decides; without one it is the test set
        eval={"every": 1, "fairness": False},
        callbacks=[EarlyStopping(patience=PATIENCE), MLflow("digits", store), busiest],
        out=out,
    )
    summary, best = result.summary, result.summary["restored"]
    print(f"accuracy {summary['accuracy']:.3f} with the model of round {best['round']}, after {summary['rounds']} rounds of {ROUNDS}")
    print("stopped:", summary.get("stopped", {}).get("reason", "no"))
    print("links that moved:", busiest.moved)

    (run,) = client.search_runs([experiment])
    curve = client.get_metric_history(run.info.run_id, "accuracy")
    assert [entry.value for entry in curve] == [line["accuracy"] for line in result.history]
    assert "report.html" in {file.path for file in client.list_artifacts(run.info.run_id)}
    assert summary["accuracy"] == result.history[best["round"]]["accuracy"], "the model is that of the best round"
    assert all(torch.equal(a, b) for a, b in zip(fedrts.load(out).parameters(), result.model.parameters(), strict=True))
    assert summary["accuracy"] > (0.6 if "--short" in sys.argv else 0.93)
    assert "--short" in sys.argv or summary["stopped"]["planned"] == ROUNDS > summary["rounds"]
