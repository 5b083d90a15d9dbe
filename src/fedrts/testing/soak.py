"""A federation that is given a bad time: processes killed at random, the network cut, one node up and down all the time.

`soaked` plays it, and says what of our promises did not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random as Draws
from typing import Any

import safetensors.torch

from fedrts.flower import keys
from fedrts.testing.network import Network
from fedrts.testing.replay import replayed

EXPERIMENT = """
recipe = "paper"
data = "digits"
method = "fedrts"
rounds = {rounds}
density = 0.3
device = "cpu"
model_options = {{hidden = [16]}}
clients = {{total = {nodes}, per_round = {asked}, partition = "iid"}}
train = {{epochs = 1}}
topology = {{interval = 5}}
wire = {{value_type = "int4", feedback = true}}
guard = {{quorum = 0.5, attempts = 50}}
engine = {{wait = 240, timeout = 60}}
checkpoint = {{every = 1}}
"""
"""Small enough for ten nodes on two cores. With error feedback: what a node remembers must outlive it."""

FLAPPING = 0
"""The node that is up and down all the time."""
STEADY = 1
"""A node that nobody kills, so that one process lives from the first round to the last."""
CONNECTED, TAKES_PART = "fedrts_ready", 'fedrts_events_total{event="taking part"}'
"""Metrics of a node that has come so far."""
WORKS = 'fedrts_orders_total{outcome="answered"}', "fedrts_rounds_total"
"""What a node and a server count of their work; after this many of each they are warm."""
_FIRST = 6
SERVER = "server"
SUPERLINK = "superlink"
_SAMPLED = 1.0
"""Seconds between two looks at every process."""
_WARM = 20.0
"""Seconds in which a process may still grow, once it does its work: imports, first batches, connections."""
_PATIENT = 30.0
"""Seconds that a process has to show its metrics."""
_LAST = 5
"""Samples that do not count: it may be about to end."""
_LONG = 60.0
"""Seconds after that without which a process says nothing of a slope."""
_SETTLED = 5.0
"""Minutes over which growth is judged. Memory of a flat process comes and goes by a megabyte (a SuperLink's between two looks, a node's
in its first minutes, as threads get arenas of their own): over a minute or two its slope says nothing of the hours after."""
_OLD = 180.0
"""Seconds that one process of every role must have been watched, warm."""


@dataclass(frozen=True)
class Ordeal:
    """How long, and how bad."""

    rounds: int = 200
    nodes: int = 10
    kills: int = 24
    """SIGKILLs of nodes and server, without those of the flapping node."""
    server_kills: int = 6
    """So many of them are the server's."""
    cuts: int = 12
    seed: int = 0
    up: float = 12.0
    """Seconds that the flapping node stays once it is connected, on average."""
    down: float = 5.0
    limit: float = 3600.0
    """Seconds after which the whole is given up."""
    memory_slope: float = 0.25
    """MB by which a process may grow a minute, once it is warm; one that was watched for less than five may grow by that of five."""
    descriptors: int = 4
    """File descriptors by which a process may grow, once it is warm."""


@dataclass
class Generation:
    """One process from its start to its end, as it was looked at."""

    role: str
    pid: int
    began: float
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    """MB."""
    descriptors: list[int] = field(default_factory=list)
    scrapes: list[dict[str, float]] = field(default_factory=list)
    working: float | None = None
    """Seconds after which it did its work for the first time."""

    def look(self) -> None:
        """Take a sample of the process; nothing of one that is gone."""
        with contextlib.suppress(OSError, IndexError, StopIteration):
            place = Path(f"/proc/{self.pid}")
            descriptors = len(list((place / "fd").iterdir()))
            held = next(line for line in (place / "status").read_text("utf-8").splitlines() if line.startswith("VmRSS"))
            self.seconds.append(time.monotonic() - self.began)
            self.memory.append(int(held.split()[1]) / 1024)
            self.descriptors.append(descriptors)

    def warm(self) -> slice:
        """The samples of the warm process."""
        since = float("inf") if self.working is None else self.working + _WARM
        return slice(next((place for place, seconds in enumerate(self.seconds) if seconds >= since), len(self.seconds)), -_LAST)

    @property
    def observed(self) -> float:
        """Seconds of the warm process."""
        seconds = self.seconds[self.warm()]
        return seconds[-1] - seconds[0] if seconds else 0.0

    def slope(self, of: Sequence[float]) -> float:
        """By how much a series of the warm process grows a minute: least squares."""
        return 60 * slope(self.seconds[self.warm()], of[self.warm()])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through these points."""
    if len(x) < 2 or min(x) == max(x):
        return 0.0
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / sum((a - middle_x) ** 2 for a in x)


@dataclass
class Soaked:
    """What came of it."""

    settings: Ordeal
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    """SIGKILLs by role."""
    cuts: Counter[str] = field(default_factory=Counter)
    """Cuts of the network by kind."""
    flaps: int = 0
    """How often the flapping node went down."""
    missing: Counter[str] = field(default_factory=Counter)
    """Replies that the history misses, by reason."""
    generations: list[Generation] = field(default_factory=list)
    scraped: Counter[str] = field(default_factory=Counter)
    load: list[float] = field(default_factory=list)
    """Load of the machine, each time that processes were looked at."""
    counted: int = 0
    """Rounds whose counters were held against the history."""
    audited: int = 0
    """Lines of all audit logs."""
    agreed: int = 0
    """Messages that a node's log and the server's say the same of."""
    faults: list[str] = field(default_factory=list)
    """What did not hold."""

    def expect(self, holds: bool, words: str) -> None:
        if not holds:
            self.faults.append(words)


@dataclass
class _Process:
    """A command of ours that is started again and again."""

    role: str
    command: list[str]
    log: Path
    metrics: int
    process: subprocess.Popen[bytes] | None = None
    generation: Generation | None = None
    reading: threading.Thread | None = None
    """Who reads its metrics just now."""
    due: float | None = 0.0
    """When it is to be started; None while it runs."""

    def start(self) -> Generation:
        with open(self.log, "ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.due, self.generation = None, Generation(self.role, self.process.pid, time.monotonic())
        return self.generation

    def stop(self, how: int, pause: float) -> None:
        """End it, and start it again after a pause."""
        assert self.process is not None
        self.due = float("inf")
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)
        self.process.wait(60)
        self.due = time.monotonic() + pause

    def last(self, metric: str) -> float:
        """A metric of the process that runs, when last looked at; 0 if there is none."""
        seen = self.generation.scrapes if self.due is None and self.generation is not None else []
        return seen[-1].get(metric, 0.0) if seen else 0.0

    def scrape(self) -> dict[str, float] | None:
        """Its metrics now; None if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=_PATIENT) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


class Federation:
    """A server and its nodes, each node behind a door of its own."""

    def __init__(self, path: Path, settings: Ordeal) -> None:
        self.path, self.settings, self.run = path, settings, path / "run"
        self.authority = keys.Authority(path / "authority")
        self.authority.init([])
        self.port = _free_port()
        self.network = Network(self.port, settings.nodes)
        asked = max(2, round(0.8 * settings.nodes))
        (path / "experiment.toml").write_text(EXPERIMENT.format(rounds=settings.rounds, nodes=settings.nodes, asked=asked), "utf-8")
        fedrts = [sys.executable, "-m", "fedrts"]
        words = [path / "experiment.toml", "--address", f"127.0.0.1:{self.port}", "--tls", path / "authority", "--out", self.run]
        port = _free_port()
        self.server = _Process(SERVER, [*fedrts, "server", *map(str, words), "--metrics", str(port)], path / "server.log", port)
        self.nodes = []
        for number in range(settings.nodes):
            private, public = keys.issue(f"site-{number}", path / "keys")
            self.authority.register(public, clients=[number])
            where = ["--server", f"127.0.0.1:{self.network.port(number)}", "--key", private, "--ca", self.authority.certificate]
            decided = ["--partition", number, "--accept", "any", "--min-samples", 1, "--min-batch", 1, "--metrics", port := _free_port()]
            command = [*fedrts, "client", *map(str, (*where, *decided))]
            self.nodes.append(_Process(f"node {number}", command, path / f"site-{number}.log", port))

    @property
    def all(self) -> list[_Process]:
        return [self.server, *self.nodes]

    def rounds_done(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run / "history.jsonl").read_bytes().count(b"\n")
        return 0

    def close(self) -> None:
        for one in self.all:
            if one.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    one.process.kill()
                one.process.wait()
        self.network.close()


def soaked(path: Path, settings: Ordeal = Ordeal(), say: Any = lambda text: None) -> Soaked:  # noqa: B008
    """Play a federation with all its faults in an empty folder, and check the files that it leaves."""
    result, federation = Soaked(settings), Federation(path, settings)
    began = time.monotonic()
    try:
        _played(federation, result, say)
    finally:
        federation.close()
    result.seconds = time.monotonic() - began
    if not result.faults:
        _check(federation, result, say)
    return result


def _played(federation: Federation, result: Soaked, say: Any) -> None:
    """Until the server has finished; what goes wrong goes wrong by the seed, at rounds that it draws."""
    settings, draw = federation.settings, Draws(federation.settings.seed)
    events = list(_events(settings, draw))
    given_up, sampled, told = time.monotonic() + settings.limit, 0.0, -1
    flapping, turn, awaited = federation.nodes[FLAPPING], None, TAKES_PART
    here = list[_Process]()
    links: dict[int, Generation] = {}
    while True:
        now = time.monotonic()
        for one in federation.all:
            if one.due is not None and now >= one.due:
                result.generations.append(one.start())
        ended = [(one, one.process.poll()) for one in federation.all if one.due is None and one.process is not None]
        if (federation.server, 0) in ended:
            break
        over = (federation.run / "summary.json").exists()  # then nodes are told to go
        here = here if over else [node for node in federation.nodes if node.last(TAKES_PART) and node is not flapping]
        for one, code in ended:
            if code is not None and not (over and code == 0):
                last = one.log.read_text("utf-8", "replace").splitlines()[-3:]
                result.faults.append(f"{one.role} ended by itself with {code}: {' / '.join(last)}")
        if now > given_up:
            result.faults.append(f"not finished after {settings.limit:.0f} s: {federation.rounds_done()} of {settings.rounds} rounds")
        if result.faults:
            return
        if now >= sampled:
            sampled = now + _SAMPLED
            _look(federation, result, links)
        done = federation.rounds_done()
        if done // 20 != told:
            told = done // 20
            say(f"{done} rounds, {result.kills.total()} kills, {result.cuts.total()} cuts, {result.flaps} flaps")
        events = [event for event in events if event.round >= done or not _happened(federation, event, draw, result)]
        if turn is None and flapping.last(awaited):
            awaited = draw.choice((CONNECTED, TAKES_PART, TAKES_PART))  # next time it goes while it introduces itself, or later
            turn = now + draw.uniform(0.5, 1.5) * settings.up
        if turn is not None and now >= turn:
            flapping.stop(draw.choice((signal.SIGKILL, signal.SIGTERM)), draw.uniform(0.5, 1.5) * settings.down)
            result.flaps, turn = result.flaps + 1, None
        time.sleep(0.1)
    for node in here:  # who was away when the study ended still waits for the server
        assert node.process is not None
        try:
            result.expect(node.process.wait(60) == 0, f"{node.role} ended with {node.process.returncode}, not with the study")
        except subprocess.TimeoutExpired:
            result.faults.append(f"{node.role} did not end with the study")


@dataclass(frozen=True)
class _Event:
    round: int
    what: str
    """`server`, `node` or `cut`."""


def _events(settings: Ordeal, draw: Draws) -> Iterator[_Event]:
    """What happens after which round. The server is left alone in the end, so that one of its processes gets old."""
    last = settings.rounds - 3
    rounds = [(draw.randint(1, 6 * last // 10), SERVER) for _ in range(settings.server_kills)]
    rounds += [(draw.randint(1, last), "node") for _ in range(settings.kills - settings.server_kills)]
    rounds += [(draw.randint(1, last), "cut") for _ in range(settings.cuts)]
    return (_Event(*event) for event in sorted(rounds))


def _happened(federation: Federation, event: _Event, draw: Draws, result: Soaked) -> bool:
    """Make something happen; false where it cannot happen yet."""
    if event.what == "cut":
        silently = draw.random() < 0.5
        federation.network.cut(draw.randrange(len(federation.nodes)), draw.uniform(1, 10), silently)
        result.cuts["held back, then broken" if silently else "broken, and none let in"] += 1
        return True
    some = [node for number, node in enumerate(federation.nodes) if number not in (FLAPPING, STEADY)]
    alive = [one for one in ([federation.server] if event.what == SERVER else some) if one.due is None]
    if not alive:
        return False
    victim = draw.choice(alive)
    time.sleep(draw.uniform(0, 1))  # in any part of a round
    victim.stop(signal.SIGKILL, draw.uniform(0, 3))
    result.kills[event.what] += 1
    return True


def _look(federation: Federation, result: Soaked, links: dict[int, Generation]) -> None:
    """Sample every process, the server's SuperLink too, and read everybody's metrics."""
    result.load.append(os.getloadavg()[0])
    over = federation.run / "summary.json"
    for one in federation.all:
        if one.due is not None or one.generation is None or one.process is None or one.process.poll() is not None:
            continue
        one.generation.look()
        if one.reading is None or not one.reading.is_alive():  # a busy machine may take long to answer
            one.reading = threading.Thread(target=_read, args=(one, one.generation, one.process, result.scraped, over), daemon=True)
            one.reading.start()
        if one.generation.working is None and one.last(WORKS[one is federation.server]) >= _FIRST:
            one.generation.working = time.monotonic() - one.generation.began
    server = federation.server
    if server.due is None and server.process is not None:
        for pid in _children(server.process.pid):
            if pid not in links:
                links[pid] = Generation(SUPERLINK, pid, time.monotonic())
                result.generations.append(links[pid])
            links[pid].look()
            if links[pid].working is None and server.generation is not None and server.generation.working is not None:
                links[pid].working = time.monotonic() - links[pid].began


def _read(one: _Process, generation: Generation, process: subprocess.Popen[bytes], scraped: Counter[str], over: Path) -> None:
    """Read the metrics of a process, and count whether it answers; one that was ended meanwhile owes no answer."""
    found = one.scrape()
    if found is not None:
        generation.scrapes.append(found)
        scraped["answered"] += 1
    elif process.poll() is None and one.process is process and one.due is None and not over.exists():  # afterwards all of them end
        scraped["unanswered" if generation.scrapes else "not yet up"] += 1


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()]
    return []


def _check(federation: Federation, result: Soaked, say: Any) -> None:
    """Hold what a federation left behind against what is promised."""
    settings = federation.settings
    lines = [json.loads(line) for line in (federation.run / "history.jsonl").read_text("utf-8").splitlines()]
    result.expect([line["round"] for line in lines] == list(range(settings.rounds)), "the history does not have every round once")
    result.missing = Counter(re.sub(r"\d+", "#", str(entry["reason"])) for line in lines for entry in line["rejected"])
    summary = json.loads((federation.run / "summary.json").read_text("utf-8"))
    result.expect(summary["rejected_replies"] == 0, f"{summary['rejected_replies']} replies were rejected: {dict(result.missing)}")
    took_part = Counter(client for line in lines for client in line["clients"])
    result.expect(set(took_part) == set(range(settings.nodes)), "a node never took part")
    say("replaying the history by the serial engine")
    _check_model(federation.run, result)
    say("verifying the audit logs")
    _check_audits(federation, result)
    _check_counters(lines, result)
    _check_flatness(result)


def _check_model(run: Path, result: Soaked) -> None:
    """Is the model that of a serial replay of the history's clients, to the last bit?"""
    again, state = replayed(run)
    for name, tensors in (("model", again.layout.state_dict(state.weights)), ("masks", again.layout.by_name(state.mask.bits))):
        kept = safetensors.torch.load_file(run / f"{name}.safetensors")
        same = kept.keys() == tensors.keys() and all(
            kept[key].numpy().tobytes() == tensor.contiguous().to(kept[key].dtype).numpy().tobytes() for key, tensor in tensors.items()
        )
        result.expect(same, f"{name}.safetensors is not that of a serial replay of the history's clients")


def _check_audits(federation: Federation, result: Soaked) -> None:
    authority, server_log = federation.path / "authority" / "server.pem", federation.run / "audit.jsonl"
    logs = [("server", server_log, authority)]
    logs += [
        (node.role, federation.path / "keys" / f"site-{number}.site" / "audit.jsonl", federation.path / "keys" / f"site-{number}.pub")
        for number, node in enumerate(federation.nodes)
    ]
    for role, log, key in logs:
        said = _audit(result, role, "verify", log, "--key", key)
        result.audited += _first_number(said, "lines hang together")
    for role, log, key in logs[1:]:
        said = _audit(result, role, "compare", log, server_log, "--key", key, "--key", authority)
        result.agreed += _first_number(said, "messages have the same")


def _audit(result: Soaked, role: str, *words: object) -> str:
    ended = subprocess.run([sys.executable, "-m", "fedrts", "audit", *map(str, words)], capture_output=True, text=True, timeout=300)
    result.expect(ended.returncode == 0, f"audit {words[0]} of {role} says: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


def _first_number(text: str, words: str) -> int:
    found = re.search(rf"([\d,]+) {words}", text)
    return int(found[1].replace(",", "")) if found else 0


def _check_counters(lines: Sequence[Mapping[str, Any]], result: Soaked) -> None:
    """Check that the counters of every server process agree with the history of the rounds that it played."""
    servers = [one for one in result.generations if one.role == SERVER]
    starts = [_start(one) for one in servers]
    for number, server in enumerate(servers):
        later = [start for start in starts[number + 1 :] if start is not None]
        kept = min([len(lines), *later])  # rounds after that were played again by a later process
        pairs = zip(server.scrapes, server.scrapes[1:], strict=False)  # two alike: neither was taken in the middle of a change
        settled = [new for old, new in pairs if _rounds(old) == _rounds(new) and new.get("fedrts_rounds_done", 0) <= kept]
        if not settled or not _rounds(settled[-1]):
            continue
        done, played = int(settled[-1]["fedrts_rounds_done"]), _rounds(settled[-1])
        result.counted += played
        expected = _expected(lines[done - played : done])
        told = {name: value for name, value in _counters(settled[-1]).items() if value or name in expected}
        result.expect(told == expected, f"metrics of rounds {done - played} to {done - 1}: {told}, but their history says {expected}")
    result.expect(result.counted > 0.5 * len(lines), f"counters of only {result.counted} rounds could be held against the history")
    result.expect(not result.scraped["unanswered"], f"{result.scraped['unanswered']} scrapes of running processes were not answered")


def _start(server: Generation) -> int | None:
    """Return the first round that a server process played; None if it was never seen playing."""
    seen = next((scrape for scrape in server.scrapes if "fedrts_rounds_done" in scrape), None)
    return None if seen is None else int(seen["fedrts_rounds_done"]) - _rounds(seen)


def _rounds(scrape: Mapping[str, float]) -> int:
    return int(scrape.get("fedrts_rounds_total", 0))


def _counters(scrape: Mapping[str, float]) -> dict[str, float]:
    """The counters that a history has, summed over their labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in scrape.items():
        if (word := re.match(r"fedrts_(clients_\w+|upload_bytes|download_bytes)_total", name)) is not None:
            found[word[1]] += value
    return dict(found)


def _expected(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The same, made from lines of a history."""
    found: Counter[str] = Counter()
    for line in lines:
        reasons = [str(entry["reason"]) for entry in line["rejected"]]
        late = sum(reason in ("late", "late again") for reason in reasons)
        found["clients_asked"] += len({*line["clients"], *(entry["client"] for entry in line["rejected"])})
        found["clients_answered"] += len(line["clients"])
        found["clients_late"] += late
        found["clients_missing"] += len(reasons) - late
        found["upload_bytes"] += line["upload_bytes"]
        found["download_bytes"] += line["download_bytes"]
    return {name: float(value) for name, value in found.items() if value}


def _check_flatness(result: Soaked) -> None:
    """Does no process grow once it is warm?"""
    for role in (SERVER, SUPERLINK, "node"):
        oldest = max((one.observed for one in result.generations if one.role.startswith(role)), default=0.0)
        result.expect(oldest >= _OLD, f"no {role} lived long enough to say whether it grows")
    for one in result.generations:
        if (minutes := one.observed / 60) < _LONG / 60:
            continue
        slope = one.slope(one.memory)
        holds = slope * minutes <= result.settings.memory_slope * max(minutes, _SETTLED)
        result.expect(holds, f"{one.role} (process {one.pid}) grows by {slope:.2f} MB a minute for {minutes:.0f} minutes")
        more = one.slope([float(number) for number in one.descriptors]) * minutes
        result.expect(
            more <= result.settings.descriptors, f"{one.role} (process {one.pid}) has {more:.1f} file descriptors more at its end"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
