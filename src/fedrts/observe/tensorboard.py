"""A run as TensorBoard event files, in the folder `tensorboard` of its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrts.errors import InputError, optional

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record

FOLDER = "tensorboard"
_SCALARS = {
    "topology": ("density", "links_changed"),
    "cost": ("upload_bytes", "download_bytes", "flops", "seconds"),
}


class TensorBoardObserver:
    """Writes scalars of every round, the posterior's histograms of outer rounds, the settings and the results.

    A resumed run writes a further file that takes back what the ones before say of rounds which are now played again.
    """

    def __init__(self) -> None:
        optional("tensorboard", "tensorboard")

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if experiment.out is None:
            raise InputError("TensorBoard events are written into the run folder: give `out`")
        self.folder, self.experiment = Path(experiment.out), experiment
        self.writer = SummaryWriter(str(self.folder / FOLDER), purge_step=first_round)
        self.writer.add_text("experiment", "```toml\n" + (self.folder / "experiment.toml").read_text("utf-8") + "```", first_round)

    def played(self, record: Record) -> None:
        line = record.as_dict()
        if record.round < 0:  # step 0 is round 0's
            for name in _SCALARS["cost"]:
                self.writer.add_scalar(f"set-up/{name}", line[name], 0)
            return
        for group, names in {"test": record.metric_keys, **_SCALARS}.items():
            for name in names:
                if line.get(name) is not None:
                    self.writer.add_scalar(f"{group}/{name}", line[name], max(record.round, 0))
        self.writer.add_scalar("replies/missing", len(record.rejected), max(record.round, 0))
        if record.outer:
            self._topology(record.round)

    def _topology(self, index: int) -> None:
        """Return the run folder's line on an outer round; it is written before observers are notified."""
        from fedrts.runs.folder import RunFolder

        (line,) = [line for line in RunFolder(self.folder).topology()[-1:] if line["round"] == index]
        self.writer.add_scalar("topology/overlap", line["overlap"], index)
        for name, active in line["active"].items():
            self.writer.add_scalar(f"changed by layer/{name}", line["changed"][name] / max(active, 1), index)
        for which in ("active", "inactive"):
            if line[f"belief_{which}"] is not None:
                self._histogram(f"posterior mean/{which} links", line[f"belief_{which}"], index)

    def _histogram(self, tag: str, counts: list[int], index: int) -> None:
        """Return counts in equal bins of [0, 1]; each value counts at the middle of its bin."""
        middles = [(place + 0.5) / len(counts) for place in range(len(counts))]
        self.writer.add_histogram_raw(
            tag,
            min=0.0,
            max=1.0,
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limits=[(place + 1) / len(counts) for place in range(len(counts))],
            bucket_counts=counts,
            global_step=index,
        )

    def finished(self, summary: dict[str, Any]) -> None:
        from fedrts.config import flat

        settings = {key: value for key, value in flat(self.experiment.model_dump()).items() if isinstance(value, str | int | float)}
        results = {f"result/{key}": value for key, value in summary.items() if key not in settings and isinstance(value, int | float)}
        self.writer.add_hparams(settings, results, run_name=".", global_step=self.experiment.rounds)

    def stopped(self) -> None:
        if hasattr(self, "writer"):  # it may never have begun
            self.writer.close()
