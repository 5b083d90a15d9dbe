"""Presets: all there, all valid, their published numbers those of the paper; and when a published number may stand beside ours."""

import json
import tomllib
from dataclasses import replace

import pytest

from fedrts import data, methods
from fedrts.data.official import Official, Source
from fedrts.errors import InputError, optional
from fedrts.reproduction import estimated, planned, preset, reproduce, size_of
from fedrts.reproduction.estimate import in_words
from fedrts.reproduction.figure import _curves

NAMES = (
    "fig-accuracy tab-nlp fig-noniid fig-noniid-nlp fig-participation fig-ablation fig-gamma fig-lambda fig-alpha-adj tab-interval "
    "tab-cost-to-target fig-convergence fig-cucb tab-quantization"
)

MINE = """
title = "Mine"
figure = "lines"
metrics = ["accuracy_last10"]
claims = ["Ours is best."]

[paper]
methods = ["fedrts", "fedavg"]
densities = [0.5]
seeds = [0, 1]
experiment = { rounds = 2, clients = { total = 4, per_round = 2 }, train = { epochs = 1 } }
parts = [
  { name = "whole", experiment = { data = "digits" } },
  { name = "altered", experiment = { data = "altered_images", model = "mlp", model_options = { hidden = [12, 10] } } },
  { name = "absent", experiment = { data = "cinic10" } },
]

[small]
methods = ["fedrts"]
seeds = [0]
parts = [{ name = "digits", experiment = { data = "cifar10" }, instead = { data = "digits" } }]

[[published]]
method = "fedrts"
density = 0.5
accuracy_last10 = 0.7341
"""


@pytest.fixture
def altered():
    """The toy images as if two thirds of them had been released."""
    source = Source((), needed=(), official=Official(180, 40, 3))
    data.register("altered_images", source=source)(lambda: data.get("toy_images")())
    yield
    data.data._known.pop("altered_images")


def test_every_table_and_figure_has_its_preset():
    assert preset.names() == sorted(NAMES.split())


@pytest.mark.parametrize("name", NAMES.split())
def test_a_preset_is_valid_at_both_scales(name, tmp_path):
    found = preset.load(name)
    assert bool(found.figure) == name.startswith("fig-")
    for scale in (found.paper, found.small):
        cells = [cell for part in planned(scale, tmp_path) for cell in part.grid.cells()]
        assert {cell.experiment.method for cell in cells} <= set(methods.names())
    paper = [cell.experiment for part in found.paper.parts for cell in found.paper.grid_of(part.experiment).cells()]
    assert {(e.rounds, e.topology.end, e.topology.adjust) for e in paper} <= {(500, 300, a) for a in (0.1, 0.2, 0.4, 0.6, 0.8)}
    assert {e.seed for e in paper} == set(range(5))
    rates = {1.0} if name == "fig-participation" else {0.01}
    assert {e.train.lr for e in paper} == rates
    assert {(e.data, e.train.batch_size) for e in paper} <= {(d, 64) for d in ("cifar10", "cinic10", "svhn", "tinyimagenet")} | {
        ("tinystories", 16)
    }
    assert not any(part.missing for part in planned(found.small, tmp_path)), "small scale needs no files"
    assert size_of(found.small).runs <= 80
    assert size_of(found.paper).samples


def test_published_numbers():
    """A few of each table, copied from the paper by hand."""
    nlp, interval, quantised, target = (preset.load(n) for n in ("tab-nlp", "tab-interval", "tab-quantization", "tab-cost-to-target"))
    assert (len(nlp.published), len(interval.published), len(quantised.published), len(target.published)) == (13, 12, 4, 6)
    assert nlp.published_for("perplexity", {"method": "fedsgc", "density": 0.2}) == 43.0
    assert nlp.published_for("accuracy", {"method": "fedavg", "density": 1.0}) == 0.4387
    assert nlp.published_for("paper_comm_mb", {"method": "fedmef", "density": 0.3}) == 103.51
    assert interval.published_for("accuracy_last10", {"method": "fedmef", "density": 0.2, "topology.interval": 3}) == 0.745
    assert interval.published_for("accuracy_last10", {"method": "fedmef", "density": 0.1, "topology.interval": 3}) is None
    assert quantised.published_for("memory", {"method": "fedrts"}) == 31.28
    assert target.published_for("gigabytes", {"method": "fedrts", "part": "cinic10"}) == 105.6


def test_published_numbers_of_a_list():
    found = preset.parsed(MINE + '"model_options.hidden" = [16, 8]\n', "mine")
    assert found.published_for("accuracy_last10", {"model_options.hidden": "[16, 8]"}) == 0.7341
    assert found.published_for("accuracy_last10", {"model_options.hidden": "[8]"}) is None


def test_shufflenet_with_200_classes_prunes_its_output_layer_and_says_so():
    (part,) = [part for part in preset.load("fig-accuracy").paper.parts if part.name == "tinyimagenet-shufflenet_v2"]
    assert part.experiment["model_options"] == {"prune_output": True}
    assert "prune_output" in part.remark


@pytest.mark.parametrize("name", NAMES.split())
def test_fedmef_prunes_activations_where_there_are_convolutions(name):
    found = preset.load(name)
    for scale in (found.paper, found.small):
        cells = [cell.experiment for part in scale.parts for cell in scale.grid_of(part.experiment).cells()]
        language = name in ("tab-nlp", "fig-noniid-nlp")
        assert all(e.method_options["sap"] is not language for e in cells if e.method == "fedmef")
        assert not any(e.method_options.get("ws") for e in cells)
        assert not any("sap" in e.method_options for e in cells if e.method != "fedmef")


def test_options_of_one_method_are_overridden_by_the_grid():
    text = SHORT.replace(
        'methods = ["fedrts", "fedavg"]', 'methods = ["fedrts", "fedcucb"]\noptions = { fedrts = { gamma = 0.2, scale = 3.0 } }'
    )
    cells = preset.parsed(text, "mine").small.grid_of({}).cells()
    assert {(c.experiment.method, c.experiment.method_options["gamma"]) for c in cells} == {("fedrts", 0.2), ("fedcucb", 0.5)}
    varied = text.replace("seeds = [0, 1]", 'seeds = [0, 1]\ngrid = { "method_options.gamma" = [0.1, 0.9] }')
    given = [cell.experiment.method_options for cell in preset.parsed(varied, "mine").small.grid_of({}).cells()]
    assert {options["gamma"] for options in given} == {0.1, 0.9}
    assert {options["scale"] for options in given if "scale" in options} == {3.0}
    with pytest.raises(InputError, match="options fedtiny is not among the methods"):
        preset.parsed(text.replace("options = { fedrts", "options = { fedtiny"), "mine")


def test_traffic_relative_to_dense_averaging(played):
    """In the paper's accounting 2·O_s + 0.5·0.4·O_s over 2·O_d, where a model on a mask has a bitmap and 4 bytes a value."""
    _, _, document = played
    text = replace(document, preset=document.preset.model_copy(update={"ratio_to": "fedavg"})).markdown()
    block = text.partition("Bytes of an outer round, relative to fedavg's")[2]
    rows = {cells[1]: cells[2:] for line in block.splitlines()[:9] if len(cells := [c.strip(" *") for c in line.split("|")]) > 3}
    links, parameters = 64 * 16, 64 * 16 + 16 + 16 * 10 + 10
    expected = []
    for density in (0.4, 0.6):
        sparse = 4 * density * links + links / 8 + 4 * (parameters - links)
        expected.append(f"{1.1 * sparse / (4 * parameters):.4f}")
    assert sorted(value.partition(" ")[0] for value in rows["fedrts"] if value[:1].isdigit()) == expected
    assert [value.partition(" ")[0] for value in rows["fedavg"] if value[:1].isdigit()] == ["1.0000"]


def test_the_main_figure_has_traffic_beside_accuracy_and_says_where_its_lead_comes_from():
    found = preset.load("fig-accuracy")
    assert found.ratio_to == "fedavg"
    assert found.metrics == ["accuracy_last10", "comm_ratio"]
    (claim,) = [claim for claim in found.claims if "5.1 %" in claim]
    printed = preset.load("tab-interval")

    def by(method: str, interval: int) -> float:
        found = printed.published_for("accuracy_last10", {"method": method, "topology.interval": interval})
        assert found is not None
        return found

    assert round(100 * (by("fedrts", 10) - by("feddst", 5)), 1) == 5.1
    assert round(100 * (by("fedrts", 10) - by("feddst", 10)), 1) == 1.1
    assert "FedDST at ΔT = 5" in claim
    assert "1.1 points" in claim


def test_published_numbers_stand_beside_complete_data_only(altered, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE, "utf-8")
    document = reproduce(str(tmp_path / "mine.toml"), tmp_path / "out", "paper", data_dir=tmp_path)
    text = (tmp_path / "out" / "results.md").read_text("utf-8")
    assert text == document.markdown()
    whole, altered_part, absent = text.split("\n## ")[1:4]
    assert whole.count("(published 0.7341)") == 1
    assert "published 0" not in altered_part
    assert "altered_images has 120 of 180 training samples" in altered_part
    assert absent.startswith("absent\n\n**Not run: the data set 'cinic10' is not in")
    assert "- Ours is best." in text
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "whole" / "runs" / "fedrts-d0.5-s0" / "summary.json").exists()
    assert (tmp_path / "out" / "preset.toml").read_text("utf-8") == MINE


def test_at_small_scale_nothing_is_published_and_other_data_stand_in(tmp_path):
    found = preset.parsed(MINE, "mine")
    assert [part.data for part in planned(found.small, tmp_path)] == ["digits"]
    (tmp_path / "mine.toml").write_text(
        MINE.replace("seeds = [0]", "seeds = [0]\nexperiment = { rounds = 1, train = { epochs = 1 } }"), "utf-8"
    )
    reproduce(str(tmp_path / "mine.toml"), tmp_path / "out", "small", data_dir=tmp_path)
    assert "(published" not in (tmp_path / "out" / "results.md").read_text("utf-8")


def cost_to_target(tmp_path, grid=""):
    """The lines about fedavg, which is to reach what the method `random` does, and the folder of the runs."""
    text = (
        MINE.replace('figure = "lines"', 'target = "random"')
        .replace('"fedrts", "fedavg"', '"random", "fedavg"')
        .replace("rounds = 2", "rounds = 14")
        .replace("densities = [0.5]", f"densities = [0.5]\n{grid}")
    )
    text = text.partition("[[published]]")[0].replace('methods = ["fedrts"]', 'methods = ["random"]')
    text = "\n".join(line for line in text.splitlines() if "altered" not in line and "absent" not in line)
    text += '\n[[published]]\nmethod = "fedavg"\npart = "whole"\nflops = 3.4e16\n'
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    reproduce(str(tmp_path / "mine.toml"), tmp_path / "out", "paper", data_dir=tmp_path)
    table = (tmp_path / "out" / "results.md").read_text("utf-8").partition("Until the mean")[2]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| fedavg |")]
    return lines, tmp_path / "out" / "whole" / "runs"


def expected_cost(runs, place=""):
    """Rounds and GB sent of fedavg, by hand."""
    names = [f"{method}{place}-s{seed}" for method in ("random-d0.5", "fedavg") for seed in (0, 1)]
    histories = [[json.loads(entry) for entry in (runs / name / "history.jsonl").read_text("utf-8").splitlines()] for name in names]
    rounds, spent = [], []
    for slow, fast in zip(histories[:2], histories[2:], strict=True):
        goal = sum(entry["accuracy"] for entry in slow[-10:]) / 10
        first = next(t for t in range(9, 14) if sum(entry["accuracy"] for entry in fast[t - 9 : t + 1]) / 10 >= goal)
        rounds.append(first + 1)
        spent.append(sum(entry["upload_bytes"] + entry["download_bytes"] for entry in fast[: first + 1]))
    return f"{sum(rounds) / 2:.0f}", f"{sum(spent) / 2e9:.3g}"


def test_cost_to_target(tmp_path):
    """Dense averaging reaches a sparse method's accuracy, with the bytes of its history until then; published costs stand beside."""
    ((_, density, reached, round, flops, sent),), runs = cost_to_target(tmp_path)
    assert (density, reached) == ("1", "2 of 2")
    assert "(published 3.4e+16)" in flops
    assert (round, sent) == expected_cost(runs)


def test_cost_to_target_in_every_place_of_a_grid(tmp_path):
    """Two sizes of the model: the bytes of one are not those of the other."""
    lines, runs = cost_to_target(tmp_path, 'grid = { "model_options.hidden" = [[32], [96]] }')
    assert [line[:4] for line in lines] == [["fedavg", "[32]", "1", "2 of 2"], ["fedavg", "[96]", "1", "2 of 2"]]
    assert [(line[4], line[6]) for line in lines] == [expected_cost(runs, "-hidden32"), expected_cost(runs, "-hidden96")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('title = "Mine"', "title = 3"), "title must be"),
        (('figure = "lines"', 'figure = "pie"'), "figure must be"),
        (('metrics = ["accuracy_last10"]', 'metrics = ["acuracy"]'), "did you mean 'accuracy'"),
        (('title = "Mine"', 'title = "Mine"\nx = "train.lr"'), "neither density nor a key"),
        (('title = "Mine"', 'title = "Mine"\ntarget = "fedpaq"'), "not among the methods"),
        (('title = "Mine"', 'title = "Mine"\nratio_to = "fedpaq"'), "ratio_to fedpaq is not among the methods"),
        (('title = "Mine"', 'titel = "Mine"'), "did you mean 'title'"),
        (('title = "Mine"', "title = "), "no valid TOML"),
    ],
)
def test_a_mistake_in_a_preset_is_one_line(change, words):
    with pytest.raises(InputError, match=words) as error:
        preset.parsed(MINE.replace(*change), "mine")
    assert "\n" not in str(error.value)


def test_another_preset_in_the_same_folder_is_refused(tmp_path):
    (tmp_path / "preset.toml").write_text(preset.text("fig-gamma"), "utf-8")
    with pytest.raises(InputError, match="holds another reproduction"):
        reproduce("fig-lambda", tmp_path)


def test_nothing_to_run_is_told(tmp_path):
    with pytest.raises(InputError, match="fedrts data prepare tinystories"):
        reproduce("tab-nlp", tmp_path / "out", "paper", data_dir=tmp_path)
    assert not (tmp_path / "out").exists()


def test_estimate(tmp_path):
    """Positive, and twice as long for twice the seeds within what clocks allow."""
    found = preset.load("fig-lambda")
    runs, seconds = estimated(found, "small", tmp_path)
    assert runs == size_of(found.small).runs
    assert 0 < seconds < 600
    assert [in_words(seconds) for seconds in (20, 600, 7200, 1e6)] == [
        "about 20 seconds",
        "about 10 minutes",
        "about 2 hours",
        "about 11.6 days",
    ]


def test_presets_can_be_copied():
    for name in preset.names():
        assert "fedrts reproduce YOUR.toml" in preset.text(name).partition("\n")[0]
        assert tomllib.loads(preset.text(name))["title"]


# -- copies with mistakes, or more than the presets of the package have ----------------------------------------------

SHORT = """
title = "Short"
metrics = ["accuracy_last10"]

[paper]
methods = ["fedrts"]
seeds = [0]
parts = [{ name = "digits" }]

[small]
methods = ["fedrts", "fedavg"]
densities = [0.6, 0.4]
seeds = [0, 1]
experiment = { rounds = 11, clients = { total = 4, per_round = 2 }, train = { epochs = 1 }, model_options = { hidden = [16] } }
parts = [{ name = "digits" }]
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((('metrics = ["accuracy_last10"]', "metrics = []"),), "metrics"),
        ((('parts = [{ name = "digits" }]', 'parts = [{ name = "a" }, { name = "a" }]'),), "two parts are called 'a'"),
        ((('name = "digits"', 'name = "../digits"'),), r"called '\.\./digits', which is no name for a folder"),
        (
            (
                ('title = "Short"', 'title = "Short"\nfigure = "lines"\nx = "clients.partition"'),
                ("seeds", 'grid = { "clients.partition" = ["iid"] }\nseeds'),
            ),
            "values that are no numbers",
        ),
        ((('title = "Short"', 'title = "Short"\npublished = [{ method = "fedrts", accuracy_last10 = "n/a" }]'),), "'n/a' is no number"),
    ],
)
def test_mistakes_in_a_preset_are_told_before_anything_runs(changes, words):
    text = SHORT
    for old, new in changes:
        text = text.replace(old, new)
    with pytest.raises(InputError, match=words):
        preset.parsed(text, "mine")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "mine.toml").write_text(SHORT, "utf-8-sig")
    assert preset.load(str(tmp_path / "mine.toml")).title == "Short"


@pytest.fixture
def played(tmp_path):
    """Two densities and a dense method, once with curves."""
    text = SHORT.replace('title = "Short"', 'title = "Short"\nfigure = "curves"')
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    return text, tmp_path / "mine.toml", reproduce(str(tmp_path / "mine.toml"), tmp_path / "out")


def test_densities_are_lines_of_their_own_and_a_changed_preset_is_not_kept(played, tmp_path):
    text, file, document = played
    (outcome,) = document.outcomes
    panel = optional("matplotlib.figure", "plot").Figure().subplots()
    _curves(panel, outcome, "bytes", "MB", 1e6)
    lines = {line.get_label(): line.get_ydata() for line in panel.get_lines()}
    assert set(lines) == {"fedrts density 0.6", "fedrts density 0.4", "fedavg"}
    results = outcome.compared.results()
    for density in (0.6, 0.4):
        assert lines[f"fedrts density {density}"][-1] == pytest.approx(results.mean("fedrts", (density,)).value)
    file.write_text(text.replace("rounds = 11", "rounds = 12"), "utf-8")
    with pytest.raises(InputError, match="rounds is 11, not 12"):
        reproduce(str(file), tmp_path / "out")
    assert (tmp_path / "out" / "preset.toml").read_text("utf-8") == text


def test_published_costs_stand_beside_their_density(played):
    _, _, document = played
    published = [{"method": "fedrts", "density": density, "megabytes": value} for density, value in ((0.6, 66.0), (0.4, 44.0))]
    paper = replace(
        document, preset=document.preset.model_copy(update={"published": published, "paper": document.preset.small}), size="paper"
    )
    rows = [line for line in paper._costs(document.outcomes[0]).splitlines() if line.startswith("| fedrts")]
    assert ["published 66.00" in row for row in rows] == [True, False]
    assert ["published 44.00" in row for row in rows] == [False, True]


def test_a_metric_without_values_is_said(played):
    _, _, document = played
    text = replace(document, preset=document.preset.model_copy(update={"metrics": ["perplexity", "accuracy"]})).markdown()
    assert "(`perplexity`):\n\nNo run has a value of it." in text
    assert "| fedrts |" in text


def test_at_paper_scale_missing_data_are_named_before_anything_is_asked(tmp_path):
    with pytest.raises(InputError, match="nothing of it can be run: the data set 'cifar10' is not in"):
        estimated(preset.load("tab-interval"), "paper", tmp_path)
