"""Rounds as events, for witnesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrts.audit.log import CONFIGURED
from fedrts.audit.witness import Witness
from fedrts.config import flat

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record


class Told:
    """Passes the results of rounds to a witness."""

    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self._epsilon: Any = None

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        settings = {key: value for key, value in flat(experiment.model_dump(mode="json")).items() if value is not None}
        self.witness(CONFIGURED, settings=settings)
        self._epsilon = facts.get("epsilon")
        self.witness("started", round=first_round, density=facts["density"], parameters=facts["parameters"], bytes=facts["bytes"])

    def played(self, record: Record) -> None:
        spent = {} if self._epsilon is None else {"epsilon": self._epsilon()}
        metrics = {name: value for name in record.metric_keys if (value := record.as_dict().get(name)) is not None}
        names = ("round", "clients", "rejected", "density", "links_changed", "upload_bytes", "download_bytes", "seconds")
        self.witness("round", **{name: getattr(record, name) for name in names}, metrics=metrics, **spent)
        self.witness.seal()

    def finished(self, summary: dict[str, Any]) -> None:
        self.witness("finished", rounds=summary["rounds"], digests=summary.get("digests", {}))

    def stopped(self) -> None:
        self.witness("stopped")
