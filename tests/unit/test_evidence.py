"""benchmarks/evidence.py: the committed tables are those of the committed raw results, and `fedrts compare` takes every command.

Studies: which cells come next, for how long they are played, and that one that was cut off goes on as if nothing had happened.
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import signal
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedrts import cli, config
from fedrts.errors import InputError
from fedrts.server import rounds

ROOT = Path(__file__).parents[2]


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("evidence")


def test_tables_are_those_of_the_raw_results(evidence):
    assert evidence.render() == (ROOT / "benchmarks" / "results" / "evidence.md").read_text("utf-8")


def test_a_mean_by_hand(evidence):
    raw = json.loads((evidence.RAW / "digits.json").read_text("utf-8"))
    own = [run["summary"]["accuracy_last10"] for run in raw["runs"] if run["summary"]["method"] == "fedrts"]
    error = statistics.stdev(own) / len(own) ** 0.5
    assert f"| fedrts | {statistics.mean(own):.4f} ± {error:.4f} |" in evidence.render()


def test_accuracies_are_those_of_the_runs(evidence):
    """What a summary says is the mean over the last ten evaluations, which are of the last ten rounds."""
    for file in evidence.RAW.glob("*.json"):
        for run in json.loads(file.read_text("utf-8"))["runs"]:
            last = run["evaluations"][-10:]
            assert [index for index, *_ in last] == list(range(last[-1][0] - 9, last[-1][0] + 1)), run["cell"]
            assert statistics.mean(accuracy for _, accuracy, _ in last) == pytest.approx(run["summary"]["accuracy_last10"])


def test_longer_means_by_hand(evidence):
    """The last 100 of 500 rounds have twenty evaluations, five rounds apart; those of the last ten rounds count no more than others."""
    raw = json.loads((evidence.RAW / "main.json").read_text("utf-8"))
    accuracies = {index: accuracy for index, accuracy, _ in raw["runs"][0]["evaluations"]}
    found = evidence.of_last(raw, 100)["runs"][0]["summary"]["accuracy_last10"]
    assert found == pytest.approx(statistics.mean(accuracies[index] for index in range(404, 500, 5)))
    assert found != raw["runs"][0]["summary"]["accuracy_last10"]


def test_runs_of_the_main_comparison_are_borrowed(evidence):
    """At paper scale the ablation's table has the runs of FedRTS that the main comparison made, and no others of it."""
    main = json.loads((evidence.RAW / "main.json").read_text("utf-8"))
    borrowed = [run for run in main["runs"] if run["summary"]["method"] in evidence.COMPARISONS["ablation"].borrowed]
    assert {run["summary"]["method"] for run in borrowed} == {"fedrts"}
    other = {**borrowed[0], "summary": {**borrowed[0]["summary"], "method": "fedcucb", "accuracy_last10": 0.5}}
    text = "\n".join(evidence.tables({"command": "c", "axes": [], "runs": [other], "trials": []}, borrowed))
    assert "| fedcucb | *0.5000* (1 of 3 seeds) |" in text
    assert "| fedrts | **0." in text


@pytest.mark.parametrize("scale", ["", "digits_"])
def test_commands_are_understood(evidence, scale):
    """Every comparison names known methods and keys; the values that the main one has are left out at paper scale."""
    from fedrts import config, methods

    for name, comparison in evidence.COMPARISONS.items():
        if name.startswith("digits") != bool(scale):
            continue
        words = shlex.split(evidence.command(name))
        assert words[:2] == ["fedrts", "compare"]
        options = list(zip(words[2::2], words[3::2], strict=True))
        assert set(dict(options)["--methods"].split(",")) <= set(methods.names())
        pairs = [value for flag, value in options if flag == "--set"]
        pairs += [value.split("=")[0] + "=" + value.split("=")[1].split(",")[0] for flag, value in options if flag == "--grid"]
        own = {"data": dict(options)["--data"], "method": comparison.methods[-1], "device": "cpu"}
        config.resolve(own, {"model": dict(options).get("--model", "auto")}, config.from_assignments(pairs))
    assert "interval=3,5,20" in evidence.command("interval")
    assert "interval=3,5,10,20" in evidence.command("digits_interval")


def test_pieces_are_collected_one_after_the_other(evidence, monkeypatch, tmp_path):
    """A folder's runs join those that are there; a cell that was played again has the new run. The order is that of the names."""
    monkeypatch.setattr(evidence, "RAW", tmp_path / "raw")
    monkeypatch.setattr(evidence, "run_of", lambda folder: {"cell": folder.name, "from": folder.parts[-3]})
    for piece, cells in {"first": ("b-s0", "c-s0"), "second": ("a-s0", "b-s0")}.items():
        for cell in cells:
            (tmp_path / piece / "runs" / cell).mkdir(parents=True)
            (tmp_path / piece / "runs" / cell / "summary.json").touch()
        (tmp_path / piece / "compare.toml").write_text('grid = {"clients.alpha" = [5]}', "utf-8")
        file = evidence.collect("heterogeneity", tmp_path / piece)
    raw = json.loads(file.read_text("utf-8"))
    assert [(run["cell"], run["from"]) for run in raw["runs"]] == [("a-s0", "second"), ("b-s0", "second"), ("c-s0", "first")]
    assert raw["axes"] == ["clients.alpha"]
    assert raw["command"] == evidence.command("heterogeneity")


def test_what_a_key_does_to_a_method_by_hand(evidence):
    """Over the seeds that both values have: the run with the usual one is subtracted."""
    found = {}
    for name in ("short", "interval"):
        for run in json.loads((evidence.RAW / f"{name}.json").read_text("utf-8"))["runs"]:
            if run["summary"]["method"] == "fedrts":
                found[run["settings"]["topology.interval"], run["summary"]["seed"]] = run["summary"]["accuracy_last10"]
    less = [found[3, seed] - found[10, seed] for seed in (0, 1, 2)]
    error = statistics.stdev(less) / len(less) ** 0.5
    line = next(line for line in evidence.render().splitlines() if line.startswith("| interval 3 |"))
    assert f"| {statistics.mean(less):+.4f} ± {error:.4f} (p" in line


# -- studies ------------------------------------------------------------------------------------------------------

DIGITS = {
    "data": "digits",
    "model": "mlp",
    "rounds": 2,
    "clients.total": 6,
    "clients.per_round": 2,
    "train.epochs": 1,
    "device": "cpu",
    "checkpoint.every": 1,
    "eval.fairness": False,
}


@pytest.fixture
def studies(evidence):
    return importlib.import_module("studies")


@pytest.fixture
def cells(evidence):
    return importlib.import_module("cells")


@pytest.fixture
def tiny(studies):
    """Two methods and then one, with seeds of their own."""
    parts = (studies.Part(studies.entrants("random", "fedrts"), range(2)), studies.Part(studies.entrants("fedmef"), range(1)))
    return studies.Study("Digits", DIGITS, densities=(0.1, 0.2), parts=parts, rates=(0.1, 0.3, 1.0))


@pytest.fixture
def raw(evidence, monkeypatch, tmp_path, tiny):
    """Where raw results of the tiny study lie."""
    monkeypatch.setattr(evidence, "RAW", tmp_path / "raw")
    monkeypatch.setattr(evidence, "STUDIES", {"tiny": tiny})
    return tmp_path / "raw"


def trial(name, density, rate):
    return f"{name}-d{density:g}-lr{rate:g}-s200"


def scored(density, **accuracies):
    """Scores of the rates 0.1, 0.3, 1.0 (and 1.5) at a density."""
    rates = (0.1, 0.3, 1.0, 1.5)
    return {trial(name, density, rate): score for name, own in accuracies.items() for rate, score in zip(rates, own, strict=False)}


def names_of(study, scores):
    return [cell.name for cell in study.cells("tiny", scores) if cell.name not in scores]


def test_rates_are_chosen_before_results_are_taken(tiny):
    """Nothing is known: the trials of all. One density is chosen: its runs, seed by seed, each at its method's own best rate."""
    first = names_of(tiny, {})
    assert first[:3] == ["random-d0.1-lr0.1-s200", "fedrts-d0.1-lr0.1-s200", "random-d0.1-lr0.3-s200"]
    assert len(first) == 18
    assert all(name.endswith("-s200") for name in first)
    chosen = scored(0.1, random=(0.5, 0.6, 0.55), fedrts=(0.5, 0.7, 0.6))
    wanted = [f"{name}-d0.1-lr0.3-s{seed}" for seed in (0, 1) for name in ("random", "fedrts")]
    assert names_of(tiny, chosen)[:5] == [*wanted, "random-d0.2-lr0.1-s200"]


@pytest.mark.parametrize(
    ("scores", "wider"),
    [
        ((0.5, 0.6, 0.7), 1.5),
        ((0.7, 0.6, 0.5), 0.05),
        ((None, None, None), 0.05),
    ],
    ids=["highest", "lowest", "all diverge"],
)
def test_a_best_rate_at_the_edge_widens_the_rates_of_all(tiny, scores, wider):
    """No run is taken before the wider rate is tried, by the method whose best is inside too."""
    found = names_of(tiny, scored(0.1, random=(0.5, 0.6, 0.55), fedrts=scores))
    assert found[:2] == [trial("random", 0.1, wider), trial("fedrts", 0.1, wider)]
    assert not [name for name in found if name.endswith(("-s0", "-s1"))]


def test_a_rate_that_diverges_is_the_worst(tiny):
    """It ends the widening, and a later part begins with all rates of the earlier one."""
    scores = scored(0.1, random=(0.5, 0.6, 0.7, None), fedrts=(0.5, 0.6, None, None))
    found = names_of(tiny, scores)
    assert found[:2] == ["random-d0.1-lr1-s0", "fedrts-d0.1-lr0.3-s0"]
    assert [name for name in found if name.startswith("fedmef-d0.1")] == [trial("fedmef", 0.1, rate) for rate in (0.1, 0.3, 1.0, 1.5)]


@pytest.mark.parametrize("change", [{"choosing_seeds": (150,)}, {"choosing_seeds": (7,)}, {"rates": (0.1, 0.3)}])
def test_reserved_seeds_and_rates_without_an_inside_are_refused(tiny, change):
    with pytest.raises(InputError):
        replace(tiny, **change)


@pytest.mark.parametrize("seed", [20, 100, 199, 200])
def test_results_have_low_seeds(tiny, studies, seed):
    with pytest.raises(InputError, match=f"seed {seed} is none of a result"):
        replace(tiny, parts=(studies.Part(studies.entrants("random"), (0, seed)),))


def test_declared_studies_are_understood(evidence):
    """Every cell is an experiment, only trials leave out a validation split, and no study names a seed that is never used."""
    for name, study in evidence.STUDIES.items():
        needed = {cell.name: cell for cell in study.cells(name, {})}
        runs = study.runs(name, study.parts[0], study.densities[0], study.choice(name, study.parts[0], study.densities[0], {}))
        for cell in (*needed.values(), *runs):
            resolved = config.resolve(config.nested({**cell.settings, "device": "cpu"}))
            assert (resolved.data_options.get("validation") == study.validation) is cell.is_trial
            assert cell.seed < 20 or cell.seed >= 200
        assert {entrant.name for entrant in study.entrants} == {cell.entrant.name for cell in needed.values()}


def test_studies_and_comparisons_have_names_of_their_own(evidence):
    assert not set(evidence.STUDIES) & set(evidence.COMPARISONS)


def test_given_rates_need_no_trials(tiny, studies):
    """An entrant with a rate of its own is run at it at once, beside others that choose."""
    given, choosing = studies.Entrant("feddst", "feddst", rate=0.7), studies.entrants("random")
    study = replace(tiny, densities=(0.1,), parts=(studies.Part((given, *choosing), range(1)),))
    assert names_of(study, {}) == [trial("random", 0.1, rate) for rate in (0.1, 0.3, 1.0)]
    chosen = scored(0.1, random=(0.5, 0.6, 0.55))
    assert names_of(study, chosen) == ["feddst-d0.1-lr0.7-s0", "random-d0.1-lr0.3-s0"]
    alone = replace(study, parts=(studies.Part((given,), range(2)),))
    assert names_of(alone, {}) == ["feddst-d0.1-lr0.7-s0", "feddst-d0.1-lr0.7-s1"]


def test_variants_of_a_key_are_named_after_it(studies):
    (low, high) = studies.Entrant("feddst", "feddst", {"method_options.merge": "plain"}, rate=1.0).varied("topology.interval", 3, 20)
    assert (low.name, high.name) == ("feddst_interval3", "feddst_interval20")
    assert high.options == {"method_options.merge": "plain", "topology.interval": 20}
    assert high.rate == 1.0


def test_given_rates_are_those_that_the_first_study_chose(evidence, studies):
    """At density 0.05 with SGD: a rate that is written down equals the one that the committed trials choose."""
    first = evidence.STUDIES["right"]
    choice = first.choice("right", first.parts[0], 0.05, evidence.known_of("right").scores)
    assert choice.is_over
    given = [one for study in evidence.STUDIES.values() if "train.optimizer" not in study.shared for one in study.entrants if one.rate]
    assert given
    for entrant in given:
        assert entrant.rate == choice.best(entrant.method), entrant.name


class Clock:
    """Time that passes while somebody sleeps."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Pretended:
    """A process that leaves a result after so many seconds, and stops when it is asked to."""

    def __init__(self, arguments, clock, seconds):
        self.home, self.clock, self.ends = Path(arguments[arguments.index("--out") + 1]), clock, clock() + seconds
        self.is_asked = False

    def poll(self):
        if self.clock() < self.ends:
            return None
        self.home.mkdir(exist_ok=True)
        (self.home / "experiment.toml").touch()
        (self.home / "summary.json").touch()
        return 0

    def terminate(self):
        self.is_asked = True

    def wait(self, timeout=None):
        self.clock.now += 0.5
        return 130


@pytest.fixture
def sitting(cells, tiny, tmp_path):
    """Plays pretended cells of so many seconds."""

    def make(seconds, jobs=2):
        clock = Clock()
        started = []

        def launch(arguments, log):
            started.append(Pretended(arguments, clock, seconds))
            return started[-1]

        def read(home, known):
            known.trials[home.name] = {"cell": home.name, "valid_accuracy": 0.5}

        made = cells.Sitting({"tiny": tiny}, {"tiny": cells.Known()}, tmp_path / "played", jobs, read, launch=launch, clock=clock)
        return replace(made, sleep=clock.sleep, tell=lambda words: None), started

    return make


def test_cells_that_do_not_fit_are_not_started(sitting):
    """After the first two it is known that a cell takes 30 seconds: in 110 there is time for three rows of them, and for no fourth."""
    made, started = sitting(30)
    assert made.play(110) == 6
    assert len(started) == 6
    assert made.clock.now < 110
    assert not any(process.is_asked for process in started)


def test_long_cells_are_cut_off_before_the_time_is_over(sitting, cells):
    """They are worth their start, since they go on next time; near the end none is."""
    made, started = sitting(400)
    made.known["tiny"].runs["an earlier one"] = {"played": {"model": "mlp", "method": "random", "rounds": 2, "gpu_seconds": 200}}
    assert made.play(100) == 0
    assert len(started) == 2
    assert all(process.is_asked for process in started)
    assert made.clock.now < 100
    made, started = sitting(400)
    made.known["tiny"].runs["an earlier one"] = {"played": {"model": "mlp", "method": "random", "rounds": 2, "gpu_seconds": 200}}
    assert made.play(cells.WORTH) == 0
    assert not started


def test_the_queue_gives_up_where_nothing_works(sitting, monkeypatch):
    """Processes that end at once without a result are not started over and over."""
    made, started = sitting(0, jobs=1)
    monkeypatch.setattr(Pretended, "poll", lambda self: 1)
    assert made.play(1000) == 0
    assert len(started) == 3
    assert made.clock.now < 5


class Here:
    """A `fedrts` command in this process, as long as its start; one that is interrupted seems to run until it is asked to stop."""

    def __init__(self, arguments, log):
        before, handler, errors = sys.argv, signal.getsignal(signal.SIGTERM), io.StringIO()
        sys.argv = ["fedrts", *arguments]
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
                cli.main()
        except SystemExit as end:
            self.code = end.code
        finally:
            sys.argv = before
            signal.signal(signal.SIGTERM, handler)
        log.write_text(errors.getvalue(), "utf-8")

    def poll(self):
        return None if self.code == 130 else self.code

    def terminate(self): ...

    def wait(self, timeout=None):
        return self.code


@pytest.fixture
def here(cells, monkeypatch):
    monkeypatch.setattr(cells, "launched", Here)


def play(evidence, folder, minutes=1.0, given=None):
    return evidence.play([], minutes, 1, folder, None, given)


def play_only(name, monkeypatch, cells):
    missing = cells.missing
    monkeypatch.setattr(cells, "missing", lambda *known: [cell for cell in missing(*known) if cell.name == name])


def test_a_cell_that_was_cut_off_goes_on_elsewhere_to_the_same_bits(evidence, cells, raw, here, monkeypatch, tmp_path, capsys):
    """The file carries its checkpoint to a folder, say on another machine, where nothing else is."""
    name = trial("fedrts", 0.1, 0.1)
    play_only(name, monkeypatch, cells)
    monkeypatch.setattr(cells, "WORTH", 0.1)
    whole = play(evidence, tmp_path / "whole")

    real = rounds.play_round

    def interrupted(plan, before, index, ledger=None):
        if index == 1:
            raise KeyboardInterrupt
        return real(plan, before, index, ledger)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "play_round", interrupted)
        file = play(evidence, tmp_path / "first", minutes=0.01)
    assert f"{name}: cut off after 1 of 2 rounds" in capsys.readouterr().out
    assert evidence.collect_file(file) == []

    second = play(evidence, tmp_path / "second", given=file)
    assert f"{name}: started from round 1" in capsys.readouterr().out
    homes = [tmp_path / folder / "tiny" / "runs" / name for folder in ("whole", "second")]
    models = [(home / "model.safetensors").read_bytes() for home in homes]
    assert models[0] == models[1]

    def found(file):
        evidence.collect_file(file)
        return {cell: entry["valid_accuracy"] for cell, entry in evidence.known_of("tiny").trials.items()}

    assert found(whole)[name] == found(second)[name]


def test_one_file_is_collected(evidence, tiny, raw, here, monkeypatch, tmp_path, capsys):
    """The last trial, then runs at the best rates; what is collected is not played again, and the tables and the state say so."""
    monkeypatch.setattr(evidence, "STUDIES", {"tiny": replace(tiny, densities=(0.1,), parts=tiny.parts[:1])})
    last = trial("random", 0.1, 0.1)
    scores = scored(0.1, random=(None, 0.96, 0.95), fedrts=(0.5, 0.97, 0.6))
    earlier = [{"cell": cell, "valid_accuracy": score, "versions": {}} for cell, score in scores.items() if cell != last]
    raw.mkdir()
    (raw / "tiny.json").write_text(evidence.as_lines({"trials": earlier}), "utf-8")
    assert "5 of 6 trials, 0 of 4 runs" in evidence.status()
    file = play(evidence, tmp_path / "played")
    assert "5 cells finished" in capsys.readouterr().out
    assert evidence.collect_file(file) == [raw / "tiny.json"]
    assert "6 of 6 trials, 4 of 4 runs, 0 GPU minutes to go\n    best rates: random 0.3, fedrts 0.3" in evidence.status()

    runs = json.loads((raw / "tiny.json").read_text("utf-8"))["runs"]
    mean = statistics.mean(run["summary"]["accuracy_last10"] for run in runs if run["summary"]["method"] == "random")
    text = "\n".join(evidence.study_section("tiny"))
    score = evidence.known_of("tiny").scores[last]
    assert f"| random | 0.1 | {score:.4f} | **0.9600** | 0.9500 |" in text
    assert f"{mean:.4f} ±" in text
    again = play(evidence, tmp_path / "again")
    assert "0 cells finished" in capsys.readouterr().out
    assert evidence.collect_file(again) == []


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_a_trial_that_diverges_has_no_score(evidence, cells, tiny, raw, here, monkeypatch, tmp_path, capsys):
    """It is finished, and says nothing of what cells cost."""
    monkeypatch.setattr(evidence, "STUDIES", {"tiny": replace(tiny, rates=(0.1, 0.3, 1e9))})
    name = trial("random", 0.1, 1e9)
    play_only(name, monkeypatch, cells)
    evidence.collect_file(play(evidence, tmp_path / "played"))
    assert f"{name}: finished after" in capsys.readouterr().out
    known = evidence.known_of("tiny")
    assert known.scores == {name: None}
    assert not cells.Costs([known]).rates


def test_cells_share_a_gpu_under_its_service(cells, monkeypatch, tmp_path):
    """It is started in a folder of its own and ended; what is set for it is set no longer than that."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\n(echo "$@"; echo "$CUDA_MPS_PIPE_DIRECTORY"; [ -n "$1" ] || cat) >> {tmp_path}/told\n', "utf-8")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    before = dict(os.environ)
    with cells.shared_machine(6, on_gpu=True):
        private = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(private).is_dir()
    assert (tmp_path / "told").read_text("utf-8").split() == ["-d", private, private, "quit"]
    assert dict(os.environ) == before
    with cells.shared_machine(6, on_gpu=False):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_trials_and_runs_of_a_study_have_their_commands(evidence, raw):
    lines = evidence.command("tiny").splitlines()
    assert len(lines) == 18
    words = shlex.split(lines[0])
    assert words[:2] == ["fedrts", "run"]
    pairs = [value for flag, value in zip(words[2::2], words[3::2], strict=True) if flag == "--set"]
    assert config.resolve(config.from_assignments(pairs)).seed == 200


def test_rates_that_are_not_chosen_yet_are_told(evidence, tiny, raw):
    report = importlib.import_module("study_report")
    text = "\n".join(report.choosing("tiny", tiny, scored(0.1, random=(0.5, 0.6, 0.55), fedrts=(0.5, 0.6, 0.7))))
    assert "**Not chosen yet** at density 0.1, random, fedrts: 6 of 8 rates are tried; the best so far lies at the edge for fedrts." in text
    assert "| fedrts | 0.1 | 0.5000 | 0.6000 | 0.7000 | – |" in text


def test_paired_differences_by_hand(evidence):
    """Two others: Holm doubles the smaller p. The interval is the mean ± t(0.975) standard errors."""
    report = importlib.import_module("study_report")
    values = {"fedrts": (0.6, 0.61, 0.62), "random": (0.59, 0.602, 0.612), "fedmef": (0.6, 0.62, 0.61)}
    rows = [
        {"method": method, "seed": seed, "density_target": 0.1, "accuracy_last10": value}
        for method, own in values.items()
        for seed, value in enumerate(own)
    ]
    results = evidence.Results.of(rows, [], "accuracy_last10")
    less = [ours - theirs for ours, theirs in zip(values["random"], values["fedrts"], strict=True)]
    mean, error = statistics.mean(less), statistics.stdev(less) / 3**0.5
    line = next(line for line in report.differences(results, "fedrts")[1].splitlines() if line.startswith("| random"))
    _, _, _, difference, interval, p, corrected, seeds, _ = (part.strip() for part in line.split("|"))
    assert difference == f"{mean:+.4f} ± {error:.4f}"
    assert interval == f"{mean - 4.3027 * error:+.4f} to {mean + 4.3027 * error:+.4f}"
    assert float(corrected.removesuffix(" ‡")) == pytest.approx(2 * float(p), abs=0.0011)
    assert seeds == "3"


def test_fifteen_seeds_tell_one_point(evidence):
    """Where paired differences have a standard deviation of 0.01 and there are five others."""
    report = importlib.import_module("study_report")
    assert report.detectable(0.01, 15, 5) <= 0.01 < report.detectable(0.01, 14, 5)


def test_a_file_of_another_kind_is_refused(evidence, tmp_path):
    (tmp_path / "other").write_text("nothing", "utf-8")
    with pytest.raises(InputError, match="is no file that `play` wrote"):
        evidence.collect_file(tmp_path / "other")
