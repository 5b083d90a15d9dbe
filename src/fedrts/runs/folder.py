"""The run folder: all files that a run writes, under their documented names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import tomli_w
import torch
from torch import Tensor

import fedrts
from fedrts.config import CUSTOM, Experiment, Tree, flat, foreign, from_file, nested, with_newer_keys
from fedrts.data.partition import SITES
from fedrts.errors import InputError, note
from fedrts.files import explained, require_known, require_plain, sha256, write_atomically
from fedrts.methods.contract import State
from fedrts.registry import only_allowing
from fedrts.runs import checkpoint, file_schema
from fedrts.runs.checkpoint import Saved
from fedrts.runs.likeness import alike
from fedrts.server.averaging import average_of
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard

FORMAT = 1
"""Format of a run folder; raised where earlier versions could not read it any more."""


_NOT_COMPARED = {"out", "tags", "recipe", "callbacks", "checkpoint.every", "eval.fairness"} | {
    f"guard.{key}" for key in ("quorum", "attempts", "over_select", "deadline", "strikes")
}


_NOT_COMPARED |= {f"engine.{key}" for key in ("nodes", "timeout", "wait", "patience")}
_NOT_COMPARED |= {f"stop.{key}" for key in ("patience", "metric", "min_delta", "restore", "start")}
"""Keys that may change before a run is resumed: they can mend what stopped it."""


Trust = bool | Collection[str]
"""May code run that a run folder names? Or only some import paths."""


_IDENTITY = {
    "model": "model (or its rule of what may be pruned)",
    "clients": "clients' data",
    "data": "data (training, validation or test rows)",
    "frozen": "frozen part of the model",
}
"""What a checkpoint belongs to; earlier versions did not note all of it."""


_RESULTS = ("summary.json", "model.safetensors", "masks.safetensors", "average.safetensors", "fairness.json", "privacy.json")


TUNING = "tuning"
"""The folder of the trials by which a run chose its learning rate."""


TUNING_FILE = "tuning.toml"
"""What was tried there; before the run itself begins."""


_LOGS = ("history.jsonl", "topology.jsonl")


_TRIES, _PAUSE = 3, 0.02
"""How often, and after how many seconds each time, a lock is asked for that somebody may hold who only looks."""


_MODEL = ("model.safetensors", "masks.safetensors", "average.safetensors")


_BACKUP = "restore it from a backup"


_REMEDIES = dict.fromkeys(_LOGS, _BACKUP) | dict.fromkeys(_MODEL, f"{_BACKUP}, or delete summary.json and resume: the run writes it anew")


class RunFolder:
    """The folder of one run; only one process writes to it at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._logs: dict[str, IO[bytes]] = {}
        self._running: dict[str, Any] = {}
        """The digest of each log as far as it is written."""
        self._made: list[Path] = []

    # -- starting -------------------------------------------------------------------------------------------------

    def refuse_another(self) -> None:
        """Raise an `InputError` if the folder holds a run."""
        if (self.path / "experiment.toml").exists():
            settings: dict[str, Any] = {}
            with contextlib.suppress(InputError):  # `resume` tells what is wrong with it
                settings = from_file(self.path / "experiment.toml")
            again = resume_command(self.path, settings)
            raise InputError(f"{self.path} holds a run already: continue it with `{again}`, or choose another --out")

    def create(self, experiment: Experiment, tuned: bool = False) -> None:
        """Create the folder and write experiment.toml before anything else; `tuned`: trials of learning rates came first."""
        before = (TUNING, TUNING_FILE) if tuned else ()
        try:
            self.refuse_another()
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            occupied = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".") and entry.name not in before]
        except OSError as error:
            raise InputError(f"cannot write the run folder {self.path}: {error.strerror}; choose another --out") from error
        if occupied:
            raise InputError(f"{self.path} is not empty (it holds '{occupied[0]}'): choose another --out")
        self.write_experiment(experiment)

    def prolong(self, experiment: Experiment) -> None:
        """Prepare a run for more rounds than planned: its results no longer hold, its newest checkpoint does."""
        self.write_experiment(experiment)
        for name in _RESULTS:
            (self.path / name).unlink(missing_ok=True)

    def write_experiment(self, experiment: Experiment) -> None:
        """Write experiment.toml, with the versions of the software."""
        versions = {"fedrts": fedrts.__version__, "torch": torch.__version__, "device": device_name(experiment.device), "format": FORMAT}
        settings = _without_none(experiment.model_dump())
        write_atomically(self.path / "experiment.toml", tomli_w.dumps({**settings, "versions": versions}).encode())

    def discard(self) -> None:
        """Remove a folder in which nothing has happened yet, and the parents created for it."""
        with contextlib.suppress(OSError):
            (self.path / "experiment.toml").unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def owns(self, file: Path) -> bool:
        """Whether this is a file that the run keeps here, and nothing else may write."""
        inside = file.resolve().parent == self.path.resolve()
        return inside and file.name in ("experiment.toml", "clients.json", "config.json", *_LOGS, *_RESULTS)

    def experiment_file(self) -> Path:
        file = self.path / "experiment.toml"
        if self.path.is_file() and (self.path.parent / file.name).exists():
            raise InputError(f"{self.path} is a file of a run: name its folder, {self.path.parent}")
        if not file.exists() and (self.path / TUNING_FILE).exists():
            how = f"go on with the same `fedrts run` and --tune-lr, and --out {shlex.quote(str(self.path))}"
            raise InputError(f"{self.path} holds trials of learning rates, and no run yet: {how}")
        if not file.exists():
            raise InputError(f"{self.path} is no run folder: it has no experiment.toml")
        require_plain(file)
        _require_known(file, self.path)
        return file

    @contextlib.contextmanager
    def trusted(self, trust: Trust, given: Tree | None = None) -> Iterator[None]:
        """Allow settings to lead only to trusted or `given` code during the block, because a folder may come from anybody."""
        if trust is True:
            yield
            return
        allowed = [*([trust] if isinstance(trust, str) else trust or ()), *foreign(given or {})]
        named = foreign(from_file(self.experiment_file()))

        def remedy(path: str) -> str:
            flags = _allowing(dict.fromkeys([*(other for other in named if other not in allowed), path]))
            return f"if you trust whoever made {self.path}, add {shlex.join(flags)} (in Python trust=True)"

        with only_allowing(allowed, remedy):
            yield

    @property
    def begun(self) -> bool:
        """Whether a round has been recorded."""
        return any((self.path / "checkpoint").glob("*")) or (self.path / "summary.json").exists()

    @property
    def is_running(self) -> bool:
        """Whether a process is writing to it now."""
        try:
            require_plain(self.path / _LOGS[0])
            with open(self.path / _LOGS[0], "rb") as log:
                lock(log, self.path, shared=True)
        except OSError:
            return False
        except InputError as error:
            return isinstance(error.__cause__, BlockingIOError)
        return False

    def revised(self, experiment: Experiment, given: Collection[str]) -> dict[str, Any]:
        """What `experiment` changes here, of the keys that were `given`: what may change after the first round, as settings.

        Before the first round anything may, and the file is written anew. Later an `InputError` names what is another experiment's.
        """
        now = flat(_without_none(experiment.model_dump(mode="json")))
        before = with_newer_keys(flat(from_file(self.experiment_file())), now)
        changed = [key for key in given if now.get(key) != before.get(key)]
        fixed = [key for key in changed if key not in _NOT_COMPARED]
        if fixed and not self.begun:
            with self.writing():
                self.write_experiment(experiment)
                with explained(self.path / "roster.json"):
                    (self.path / "roster.json").unlink(missing_ok=True)  # whoever came to the other one comes again
        elif fixed:
            what = ", ".join(f"{key} is {before.get(key)!r} there, not {now.get(key)!r}" for key in fixed)
            raise InputError(f"{self.path} holds a run of another experiment ({what}): undo that, or choose another --out")
        return nested({key: now[key] for key in changed if key not in fixed and key in now})

    # -- while running --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Open the logs for appending, and lock out every other process."""
        with contextlib.ExitStack() as stack:
            for name in _LOGS:
                require_plain(self.path / name)
                with explained(self.path / name):
                    self._logs[name] = stack.enter_context(open(self.path / name, "ab"))
            lock(self._logs[_LOGS[0]], self.path)
            stack.callback(self._logs.clear)
            yield

    def rewind(self, saved: Saved | None) -> None:
        """Cut the logs back to when `saved` was written (to nothing without it)."""
        for name, log in self._logs.items():
            length = saved.facts["logs"][name] if saved else 0
            if (there := log.seek(0, os.SEEK_END)) < length:
                raise InputError(f"{self.path / name} is shorter ({there} bytes) than its checkpoint says ({length}): restore it")
            self._running[name] = hashlib.sha256(self._bytes(name)[:length])
            then = saved.facts.get("log_digests", {}).get(name) if saved else None  # earlier versions noted none
            if then is not None and then != self._digest(name):
                raise InputError(f"{self.path / name} is not what it was at the last checkpoint: {_REMEDIES[name]}")
            with explained(self.path / name):
                log.truncate(length)
            log.seek(0, os.SEEK_END)

    def append(self, log: str, line: Mapping[str, Any]) -> None:
        text = json.dumps(finite(line), allow_nan=False).encode() + b"\n"
        with explained(self.path / log):
            self._logs[log].write(text)
            self._logs[log].flush()
        self._running[log].update(text)

    def _digest(self, log: str) -> str:
        return f"sha256:{self._running[log].hexdigest()}"

    def save(
        self,
        state: State,
        next_round: int,
        ledger: ClientRecords,
        experiment: Experiment,
        identity: Mapping[str, Any],
        stopped: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint with its identity and how a run `stopped` with it; the logs reach the disk before it."""
        for name, log in self._logs.items():
            with explained(self.path / name):
                os.fsync(log.fileno())
        logs = {name: log.tell() for name, log in self._logs.items()}
        digests = {name: self._digest(name) for name in self._logs}
        facts = {"experiment": _comparable(experiment), "logs": logs, "log_digests": digests, "identity": dict(identity)}
        facts |= {"stopped": dict(stopped)} if stopped else {}
        checkpoint.save(self.path / "checkpoint", Saved(state, next_round, facts, ledger.tensors()))

    def stopped(self) -> dict[str, Any] | None:
        """How the run stopped before its last round; None if it did not."""
        saved = checkpoint.load(self.path / "checkpoint", check=check_saved)
        return None if saved is None else saved.facts.get("stopped")

    def replayed_from(self) -> int:
        """Return the first round that may be played again, from whichever checkpoint a run continues."""
        return checkpoint.oldest(self.path / "checkpoint")

    def load(
        self, experiment: Experiment, identity: Mapping[str, Any], device: torch.device | str, begun: Callable[[], State] | None = None
    ) -> Saved | None:
        """The newest checkpoint, if it belongs to this experiment, model and federation.

        One that does and has other tensors than a run that has just `begun` is damaged.
        """

        def check(saved: Saved) -> None:
            check_saved(saved)
            if begun is not None and self._foreign(saved, experiment, identity) is None:
                _check_alike(saved.state, begun())

        saved = checkpoint.load(self.path / "checkpoint", device, repair=True, check=check)
        if saved is None:
            return None
        if (why := self._foreign(saved, experiment, identity)) is not None:
            raise InputError(why)
        check_finite({"values": saved.state.values}, f"the newest checkpoint in {self.path}")
        return saved

    def _foreign(self, saved: Saved, experiment: Experiment, identity: Mapping[str, Any]) -> str | None:
        """Return why a checkpoint belongs to another run; None if it does not."""
        now = _comparable(experiment)
        then = _with_horizon(with_newer_keys(saved.facts["experiment"], now))
        now = _with_horizon(now)
        changed = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
        if changed:
            what = ", ".join(f"{key} (was {then.get(key)!r}, is {now.get(key)!r})" for key in changed)
            return f"the experiment in {self.path} was changed after its checkpoint: {what}; undo that, or start a new run"
        for what, name in _IDENTITY.items():
            if saved.facts["identity"].get(what, identity.get(what)) != identity.get(what):
                return f"the {name} is not that of the checkpoint in {self.path}: give the same, or start a new run"
        if not alike(*(known.get("task", "") for known in (saved.facts["identity"], identity))):
            return f"the loss, `correct` or task is not that of the checkpoint in {self.path}: give the same (and metrics), or start anew"
        return None

    # -- results --------------------------------------------------------------------------------------------------

    def write_json(self, name: str, content: object) -> None:
        write_atomically(self.path / name, json.dumps(finite(content), indent=2, allow_nan=False).encode() + b"\n")

    def write_model(
        self, model: Mapping[str, Tensor], masks: Mapping[str, Tensor], average: Mapping[str, Tensor] | None = None
    ) -> dict[str, str]:
        """Write the tensors of a finished run, and the average of late models if there is one.

        Returns the digests of these files and of the logs, for the summary.
        """
        made = {name: tensors for name, tensors in zip(_MODEL, (model, masks, average), strict=True) if tensors is not None}
        data = {name: safetensors.torch.save(dict(tensors)) for name, tensors in made.items()}
        for name, content in data.items():
            write_atomically(self.path / name, content)
        return {name: sha256(content) for name, content in data.items()} | {name: self._digest(name) for name in self._logs}

    def final_tensors(self, average: bool = False) -> dict[str, Tensor] | None:
        """Return the named tensors of a finished run's model, or of the average of its late ones; None while unfinished."""
        if not (self.path / "model.safetensors").exists():
            return None
        if average and not (self.path / "average.safetensors").exists():
            raise InputError(f"{self.path} has no average of models: take its model, or set train.average in a new run")
        return self.read_tensors("average.safetensors" if average else "model.safetensors")

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        try:
            tensors = safetensors.torch.load(self.checked(name))
        except safetensors.SafetensorError as error:
            raise InputError(f"cannot read {self.path / name}: {error}") from error
        check_finite(tensors, str(self.path / name))
        return tensors

    def verify(self) -> None:
        """Check that the files of a finished run are those that it wrote. Missing files other than the logs can be recreated."""
        for name in self._digests():
            if name in _LOGS or (self.path / name).exists():
                self.checked(name)

    def checked(self, name: str) -> bytes:
        """Return the bytes of a file; an `InputError` if they differ from a finished run's summary."""
        data = self._bytes(name)
        if self._digests().get(name, found := sha256(data)) != found:
            raise InputError(f"{self.path / name} is damaged: its bytes are not those that the run wrote; {_REMEDIES[name]}")
        return data

    def _digests(self) -> dict[str, str]:
        """Return the summary's digests of other files; earlier versions wrote none."""
        digests = (self.summary() or {}).get("digests", {})
        return {name: digest for name, digest in digests.items() if name in _REMEDIES}

    def _bytes(self, name: str) -> bytes:
        require_plain(self.path / name)
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {self.path / name}: {error.strerror}") from error

    def history(self) -> list[dict[str, Any]]:
        return self._read_log("history.jsonl", file_schema.HistoryLine)

    def topology(self) -> list[dict[str, Any]]:
        return self._read_log("topology.jsonl", file_schema.TopologyLine)

    def summary(self) -> dict[str, Any] | None:
        """Return the run's results; None while it is unfinished."""
        file = self.path / "summary.json"
        if not file.exists():
            return None
        summary: dict[str, Any] = _parsed(file, self._bytes(file.name))
        file_schema.check(file_schema.Summary, summary, str(file))
        file_schema.check_metrics(summary.get("metrics", {}), [summary], str(file))
        return summary

    def _read_log(self, name: str, line: type[file_schema.Part]) -> list[dict[str, Any]]:
        """Return the lines of a log; a torn last one (from a kill while writing) does not count."""
        file = self.path / name
        lines = self.checked(name).splitlines(keepends=True) if file.exists() or name in self._digests() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        content = [_parsed(file, text) for text in lines]
        file_schema.check(list[line], content, str(file))  # type: ignore[valid-type]
        return content


def _require_known(file: Path, path: Path) -> None:
    """Refuse a folder of a later format; what else may be wrong with its experiment.toml others say."""
    try:
        versions = tomllib.loads(file.read_text("utf-8-sig")).get("versions")
    except (OSError, ValueError):
        return
    if isinstance(versions, Mapping):
        require_known(versions.get("format"), FORMAT, path)


def _parsed(file: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged: {error}; restore it from a backup") from error


def check_saved(saved: Saved) -> None:
    """Check that a run can continue from this checkpoint, whatever it belongs to."""
    file_schema.check(file_schema.CheckpointFacts, saved.facts, "its header")
    if missing := [name for name in _LOGS if name not in saved.facts["logs"]]:
        raise InputError(f"it does not say how long {missing[0]} was")
    if len(saved.facts["identity"]["layers"]) != len(saved.state.mask.sizes):
        raise InputError("it names other layers than its mask has")
    ClientRecords.restored(saved.ledger, saved.state.mask.sizes, Guard(), "cpu")


def _check_alike(state: State, begun: State) -> None:
    """Check that a state has the tensors that the run's method continues with."""
    rest = len(begun.values) - begun.mask.number
    if (state.mask.sizes, len(state.values)) != (begun.mask.sizes, state.mask.number + rest):
        raise InputError(f"it has {len(state.values)} values for {state.mask.number} active links, and {rest} that are never pruned")
    if not torch.equal(begun.mask.sizes.touched(state.mask.bits), state.mask.bits):
        raise InputError("its mask cuts arms apart")
    found, wanted = ({"values": one.values[:0], **one.memory} for one in (state, begun))
    for name, tensor in wanted.items():
        if name not in found:
            raise InputError(f"it lacks '{name}'")
        if (found[name].dtype, found[name].shape) != (tensor.dtype, tensor.shape):
            raise InputError(f"its '{name}' is {found[name].dtype} {list(found[name].shape)}, not {tensor.dtype} {list(tensor.shape)}")
    average = average_of(state)
    if average is not None and (average.values.dtype, average.values.shape) != (state.values.dtype, state.values.shape):
        raise InputError(f"its average of models has {list(average.values.shape)} values, and the model {list(state.values.shape)}")


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse a model with non-finite weights."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"'{name}' in {where} is not finite: the file is damaged or its training diverged; use another one")


def finite(content: Any) -> Any:
    """Return `content` with null for what JSON cannot represent (an infinite perplexity)."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def device_name(device: str) -> str:
    """Return the name of a device, for the record."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"cpu, {torch.get_num_threads()} threads"


def check_versions(file: Mapping[str, Any]) -> None:
    """Note if a run continues with other versions than it began with: its bits may then differ."""
    now = {"fedrts": fedrts.__version__, "torch": torch.__version__}
    for name, version in now.items():
        if name in file and file[name] != version:
            note(f"the run began with {name} {file[name]}, this is {version}: results may differ in the last bits")


def resume_command(path: str | Path, settings: Tree) -> str:
    """Return the command that continues a run with these settings, including `--allow`; in Python if objects were given."""
    clients = settings.get("clients")
    if settings.get("model") == CUSTOM:
        return f"fedrts.train(…, out={str(path)!r}, resume=True)"
    if isinstance(clients, Mapping) and clients.get("partition") == SITES:
        return shlex.join(["fedrts", "server", str(Path(path) / "experiment.toml"), "--out", str(path), "--tls", "DIR"])
    return shlex.join(["fedrts", "resume", str(path), *_allowing(foreign(settings))])


def _allowing(paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in ("--allow", path)]


def _comparable(experiment: Experiment) -> dict[str, Any]:
    settings = _without_none(experiment.model_dump(mode="json"))
    return {key: value for key, value in flat(settings).items() if key not in _NOT_COMPARED}


def _with_horizon(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings with the rounds of the schedules in place of those played, which may be more."""
    rest = {key: value for key, value in settings.items() if key != "rounds"}
    return {**rest, "train.schedule_rounds": settings.get("train.schedule_rounds", settings["rounds"])}


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value, because TOML has no null."""
    return {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in settings.items() if v is not None}


def lock(file: IO[bytes], path: Path, shared: bool = False) -> None:
    """Lock other processes out of `path` while its `file` is open; `shared`: lock out only writers."""
    try:
        import fcntl
    except ImportError:  # not on Windows: two processes in one folder are then the user's care
        return
    kind, tries = (fcntl.LOCK_SH, 1) if shared else (fcntl.LOCK_EX, _TRIES)  # who only looks holds it for no time
    try:
        for _ in range(tries - 1):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            time.sleep(_PAUSE)
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another process is writing to {path}: wait for it, or stop it") from error
    except OSError as error:
        raise InputError(f"cannot keep other processes out of {path}: {error.strerror}; choose a folder on another disk") from error
