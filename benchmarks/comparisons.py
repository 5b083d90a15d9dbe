"""What is compared, at paper scale on one GPU and on small data: arguments of `fedrts compare`; `evidence.py` makes the tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedrts.comparison.table import text_of
from studies import Entrant, Part, Study, entrants

SPARSE = ("random", "fedrts", "feddst", "fedmef", "fedtiny", "prunefl", "fedsgc")
FEW = ("feddst", "fedmef", "fedtiny", "fedrts")
CONTROLLED = ("random", "feddst", "fedmef", "fedrts")
ABLATION = ("fedrts", "fedrts_gamma0", "fedrts_gamma1", "fedrts_no_ts", "fedcucb")
NAMED = "--set method_options.scale=100 --set method_options.candidates=named --set method_options.discount=0.8"
_HOW = "that grows named links only, is surer of what it saw and forgets"
GLOBAL = "--set method_options.scope=global"
_ACROSS = "whose layers exchange links"
MAIN, SHORT = "main", "short"


@dataclass(frozen=True)
class Comparison:
    """Methods in a setting; `borrowed` are those whose runs in another comparison, the `lender`, are part of its tables."""

    title: str
    methods: tuple[str, ...]
    setting: str
    borrowed: tuple[str, ...] = ()
    lender: str = MAIN
    label: str = ""
    """What its own runs are called there, where they are a variant of a method that is borrowed."""
    metric: str = "accuracy_last10"

    @property
    def arguments(self) -> str:
        reference = "--reference fedrts" if "fedrts" in self.methods and len(self.methods) > 1 else ""
        metric = "" if self.metric == "accuracy_last10" else f"--metric {self.metric}"
        return " ".join(filter(None, ("--recipe paper", self.setting, f"--methods {','.join(self.methods)}", reference, metric)))


@dataclass(frozen=True)
class Question:
    """A key and its values, for some methods."""

    title: str
    methods: tuple[str, ...]
    key: str = ""
    values: tuple[float | str, ...] = ()
    at_paper_scale: tuple[str, ...] = ()
    """Methods there, where they are others."""

    @property
    def grid(self) -> str:
        return f"--grid {self.key}={','.join(map(text_of, self.values))}" if self.key else ""


QUESTIONS = {
    "ablation": Question("what FedRTS is made of", ABLATION),
    "densities": Question("other densities", SPARSE),
    "interval": Question("rounds between two outer ones (ΔT)", FEW, "topology.interval", (3, 5, 10, 20), ("feddst", "fedrts")),
    "heterogeneity": Question("heterogeneity of labels (Dirichlet's a)", FEW, "clients.alpha", (0.1, 0.5, 5), CONTROLLED),
    "participation": Question("clients a round", FEW, "clients.per_round", (2, 5, 20), CONTROLLED),
    "scale": Question("λ, what one observation counts", ("fedrts",), "method_options.scale", (1, 10, 100, 1000)),
    "gamma": Question("γ, the weight of the aggregate", ("fedrts",), "method_options.gamma", (0, 0.25, 0.5, 0.75, 1)),
    "adjust": Question("α_adj, the share of links up for exchange", FEW, "topology.adjust", (0.1, 0.4, 0.8), ("feddst", "fedrts")),
}
"""What else is asked, at paper scale and on small data."""
END = Question("how long links are exchanged (T_end)", ("fedmef", "fedrts"), "topology.end", (30, 60, 90))
SCOPE = Question("links compete in their layer or with all others", ("feddst", "fedrts"), "method_options.scope", ("layer", "global"))
VARIED = sorted({question.key for question in (*QUESTIONS.values(), END, SCOPE) if question.key})
PAPER = {
    "topology.interval": 10,
    "clients.alpha": 0.5,
    "clients.per_round": 10,
    "method_options.scale": 10,
    "method_options.gamma": 0.5,
    "topology.adjust": 0.4,
}
"""Values that the main comparison has, and the short one."""

_SMALL = "--data digits --rounds 100 --set topology.interval=5 --device cpu"
_FIVE = f"{_SMALL} --seeds 0,1,2,3,4"
_TEN = f"{_SMALL} --seeds 0,1,2,3,4,5,6,7,8,9 --densities 0.05"
_OUTPUT = f"{_TEN} --set model_options.prune_output=true"
_NORMS = f"{_FIVE} --model resnet18_small --set model_options.width=8 --densities 0.05"
_SCALED = "--set topology.init_scale=sparse"
_CIFAR = "--data cifar10 --model resnet18_small --clients 100 --rounds 500 --precision bf16 --device cuda --seeds 0,1,2"
_STORIES = (
    "--data tinystories --set data_options.words=1000 --set data_options.length=64 --model tiny_gpt --set model_options.width=64 "
    "--clients 20 --per-round 5 --rounds 100 --epochs 1 --batch-size 16 --set topology.interval=5 --device cpu --seeds 0,1,2"
)
_LARGE = "--data cifar10 --model resnet18 --set model_options.stem=cifar --rounds 500 --precision bf16 --device cuda --seeds 0"
_HELD_OUT = f"{_CIFAR} --lr 0.1 --set data_options.validation=0.1"
"""As in the main comparison, whose learning rates are chosen on a tenth of the training data; 0.1 was best for all methods there."""
_BRIEF = _HELD_OUT.replace("--rounds 500", "--rounds 200")
"""How methods depend on a key is asked with shorter runs and more of them (T_end = 120)."""


def _five(setting: str) -> str:
    return setting.replace("--seeds 0,1,2", "--seeds 0,1,2,3,4")


def _digits(name: str, question: Question) -> Comparison:
    densities = "0.1,0.2" if name == "densities" else "0.05"
    setting = " ".join(filter(None, (_FIVE, f"--densities {densities}", question.grid)))
    return Comparison(f"Handwritten digits: {question.title}", question.methods, setting)


def _paper(name: str, question: Question) -> Comparison:
    """At paper scale, less what the main comparison has (of a key that is varied: the short one)."""
    others = replace(question, values=tuple(value for value in question.values if value != PAPER.get(question.key)))
    asked = question.at_paper_scale or question.methods
    methods = tuple(method for method in asked if name != "ablation" or method != "fedrts")
    densities = "0.05,0.2" if name == "densities" else "0.1"
    setting = " ".join(filter(None, (_BRIEF if question.key else _HELD_OUT, f"--densities {densities}", others.grid)))
    title = f"CIFAR-10{', 200 rounds' if question.key else ''}: {question.title}"
    return Comparison(title, methods, setting, borrowed=asked, lender=SHORT if question.key else MAIN)


_EVERY = (*SPARSE, "fedrts_trial")
_LENDERS = {
    "digits": Comparison("Handwritten digits: the methods, and one of ours, at density 0.05", _EVERY, f"{_FIVE} --densities 0.05"),
    "digits_output": Comparison("Handwritten digits: the output layer is pruned too", _EVERY, _OUTPUT),
    "digits_scaled": Comparison("Handwritten digits: first weights that suit a sparse network", _EVERY, f"{_TEN} {_SCALED}"),
}
"""Comparisons beside whose runs variants of FedRTS are shown."""


def _variant(lender: str, label: str, options: str, what: str, method: str = "fedrts") -> Comparison:
    """A method with options of its own in the setting of another comparison, beside that one's methods."""
    whole = _LENDERS[lender]
    title, setting = f"{whole.title}; {'FedRTS' if method == 'fedrts' else method} {what}", f"{whole.setting} {options}"
    return Comparison(title, (method,), setting, borrowed=whole.methods, lender=lender, label=label)


COMPARISONS = {
    MAIN: Comparison(
        "CIFAR-10: the methods at density 0.1, each with its best learning rate",
        ("fedavg", *SPARSE),
        f"{_CIFAR} --densities 0.1 --tune-lr 0.01,0.03,0.1 --tune-rounds 100",
    ),
    "narrow": Comparison(
        "CIFAR-10: a small dense network, with as many parameters as the sparse ones have at density 0.1",
        ("fedavg",),
        f"{_HELD_OUT} --set model_options.width=5",
        borrowed=("fedrts", "random"),
        label="fedavg, width 5",
    ),
    **{name: _paper(name, question) for name, question in QUESTIONS.items() if not question.key},
    SHORT: Comparison("CIFAR-10, 200 rounds: the methods at density 0.1", SPARSE, f"{_five(_BRIEF)} --densities 0.1"),
    **{name: _paper(name, question) for name, question in QUESTIONS.items() if question.key},
    "resnet18": Comparison(
        "CIFAR-10: ResNet-18 with 11.2 million parameters at density 0.1",
        ("random", "fedrts", "feddst"),
        f"{_LARGE} --lr 0.1 --set data_options.validation=0.1 --densities 0.1 --set eval.every=10",
    ),
    "stories": Comparison(
        "TinyStories: perplexity of gpt2_32m at density 0.3 after 100 rounds",
        ("fedavg", "random", "fedrts", "feddst", "fedmef"),
        "--data tinystories --model gpt2_32m --rounds 100 --epochs 1 --precision bf16 --device cuda --seeds 0 --densities 0.3 --lr 0.3",
        metric="perplexity",
    ),
    "stories_small": Comparison(
        "TinyStories, 1,000 words: perplexity of a GPT-2 with 168,128 parameters at density 0.3, each method with its best learning rate",
        ("fedavg", "random", "fedrts", "feddst", "fedmef", "fedsgc"),
        f"{_STORIES} --densities 0.3 --tune-lr 0.1,0.3,1,3 --tune-rounds 50",
        metric="perplexity",
    ),
    **_LENDERS,
    **{f"{lender}_named": _variant(lender, "fedrts, named", NAMED, _HOW) for lender in _LENDERS},
    "digits_scaled_surer": _variant("digits_scaled", "fedrts, named, λ = 300", NAMED.replace("scale=100", "scale=300"), f"{_HOW}; λ = 300"),
    "digits_scaled_global": _variant("digits_scaled", "fedrts, named, global", f"{NAMED} {GLOBAL}", f"{_HOW}, and {_ACROSS}"),
    "digits_scaled_global_fedrts": _variant("digits_scaled", "fedrts, global", GLOBAL, _ACROSS),
    **{
        f"digits_scaled_global_{name}": _variant("digits_scaled", f"{name}, global", GLOBAL, _ACROSS, name)
        for name in ("feddst", "fedsgc", "fedrts_trial")
    },
    "digits_scaled_output": Comparison(
        "Handwritten digits: first weights that suit a sparse network, and the output layer is pruned too",
        _EVERY,
        f"{_OUTPUT} {_SCALED}",
    ),
    "digits_scaled_heterogeneity": Comparison(
        "Handwritten digits: first weights that suit a sparse network, and heterogeneous clients (a = 0.1)",
        (*FEW, "fedrts_trial"),
        f"{_FIVE} --densities 0.05 {_SCALED} --set clients.alpha=0.1",
    ),
    "digits_norms": Comparison(
        "Handwritten digits: a network with norms (resnet18_small of width 8) at density 0.05, each method with its best learning rate",
        _EVERY,
        f"{_NORMS} --tune-lr 0.03,0.1,0.3 --tune-rounds 40",
    ),
    "digits_norms_participation": Comparison(
        "Handwritten digits: a network with norms at density 0.05, two clients a round",
        ("random", *FEW),
        f"{_NORMS} --lr 0.1 --set clients.per_round=2",
    ),
    "digits_norms_heterogeneity": Comparison(
        "Handwritten digits: a network with norms at density 0.05, heterogeneous clients (a = 0.1)",
        ("random", *FEW),
        f"{_NORMS} --lr 0.1 --set clients.alpha=0.1",
    ),
    "digits_norms_end": Comparison(
        f"Handwritten digits: a network with norms at density 0.05, {END.title}",
        END.methods,
        f"{_NORMS} --lr 0.1 {END.grid}",
    ),
    "digits_norms_scope": Comparison(
        f"Handwritten digits: a network with norms at density 0.05, {SCOPE.title}",
        SCOPE.methods,
        f"{_NORMS} --lr 0.1 {SCOPE.grid}",
    ),
    "digits_narrow": Comparison(
        "Handwritten digits: a small dense network, with as many parameters as the sparse ones have at density 0.05",
        ("fedavg",),
        f"{_FIVE} --set 'model_options.hidden=[37,37]'",
    ),
    **{f"digits_{name}": _digits(name, question) for name, question in QUESTIONS.items()},
}
"""In the order in which they are to be played."""

_RIGHT = {
    "data": "cifar10",
    "model": "resnet18_small",
    "clients.total": 100,
    "rounds": 200,
    "train.schedule": "cosine",
    "train.lr_end": 0.01,
    "engine.precision": "bf16",
    "device": "cuda",
    "checkpoint.every": "10s",
    "eval.fairness": False,
}
_LONG = {**_RIGHT, "rounds": 500}
_PRINTED = {**_LONG, "train.schedule": "constant", "train.optimizer": "adam", "train.weight_decay": 1e-3}
"""The paper's rounds with the optimiser that the authors' library has."""
_LIBRARY = {
    **_PRINTED,
    "topology.adjust": 0.2,
    "topology.init_mask": "magnitude",
    "topology.first_outer": 10,
    "topology.outer_at_end": True,
    "train.amsgrad": True,
}
_RANDOM, _FEDRTS, _FEDDST = (
    Entrant("random", "random", rate=1.5),
    Entrant("fedrts", "fedrts", rate=1.0),
    Entrant("feddst", "feddst", rate=1.0),
)
"""With the rates that the first study chose at density 0.05, which a test compares with its results."""
_PLAIN = Entrant("feddst_plain", "feddst", {"method_options.merge": "plain"})


def _candidate(name: str, **options: str | float) -> Entrant:
    return Entrant(name, "fedrts", {f"method_options.{key}": value for key, value in options.items()})


STUDIES = {
    "right": Study(
        "CIFAR-10, 200 rounds: the methods at densities 0.05 and 0.1, each with its best learning rate",
        _RIGHT,
        densities=(0.05, 0.1),
        parts=(
            Part((*entrants("random", "fedrts", "feddst"), _PLAIN, *entrants("fedsgc", "fedmef")), range(15)),
            Part(entrants("fedtiny", "prunefl", "snip", "synflow"), range(3)),
        ),
        rates=(0.1, 0.3, 0.6, 1.0),
    ),
    "candidates": Study(
        "CIFAR-10, 200 rounds: what might make FedRTS better, at density 0.05, chosen on the validation split",
        _RIGHT,
        densities=(0.05,),
        parts=(
            Part(
                (
                    *entrants("fedrts"),
                    _candidate("core", keep="core"),
                    _candidate("patience", keep="core", patience=9),
                    _candidate("start", keep="core", start=0.3),
                    _candidate("fisher", keep="core", score="fisher"),
                    Entrant("falling", "fedrts", {"method_options.keep": "core", "topology.density_start": 0.1}),
                ),
                (),
            ),
        ),
        rates=(0.6, 1.0, 1.5),
        choosing_seeds=(200, 201, 202),
    ),
    "long": Study(
        "CIFAR-10, 500 rounds: density 0.05",
        _LONG,
        densities=(0.05,),
        parts=(Part((_RANDOM, _FEDRTS, _FEDDST), range(5)),),
        rates=(0.6, 1.0, 1.5),
    ),
    "sparser": Study(
        "CIFAR-10, 200 rounds: densities 0.02 and 0.2, each method with its best learning rate",
        _RIGHT,
        densities=(0.02, 0.2),
        parts=(Part(entrants("random", "fedrts", "feddst", "fedsgc"), range(3)),),
        rates=(0.3, 0.6, 1.0),
    ),
    "keys": Study(
        "CIFAR-10, 200 rounds: single keys, at density 0.05",
        _RIGHT,
        densities=(0.05,),
        parts=(
            Part(
                tuple(
                    entrant
                    for usual in (_FEDRTS, _FEDDST)
                    for key, values in (
                        ("topology.interval", (3, 5, 20)),
                        ("clients.alpha", (0.1, 5)),
                        ("clients.per_round", (5, 20)),
                        ("topology.adjust", (0.2, 0.6)),
                    )
                    for entrant in usual.varied(key, *values)
                )
                + _FEDRTS.varied("method_options.scale", 1, 100)
                + _FEDRTS.varied("method_options.gamma", 0, 1)
                + (_FEDRTS, _FEDDST),
                range(3),
            ),
        ),
        rates=(0.6, 1.0, 1.5),
    ),
    "large": Study(
        "CIFAR-10, 200 rounds: ResNet-18 with 11.2 million parameters at density 0.05, each method with its best learning rate",
        {**_RIGHT, "model": "resnet18", "model_options.stem": "cifar", "eval.every": 10},
        densities=(0.05,),
        parts=(Part(entrants("random", "fedrts", "feddst"), range(2)),),
        rates=(0.1, 0.3, 0.6),
    ),
    "printed": Study(
        "CIFAR-10, 500 rounds: the paper's methods with Adam at 0.001 and weight decay 0.001, density 0.2",
        _PRINTED,
        densities=(0.2,),
        parts=(Part(tuple(one.at(1e-3) for one in entrants("fedavg", "random", "fedrts", "feddst", "fedmef")), range(2)),),
        rates=(0.0003, 0.001, 0.003),
    ),
    "library": Study(
        "CIFAR-10, 500 rounds, density 0.2: settings of the authors' library (Adam, α_adj 0.2, outer rounds 10 to 300)",
        _LIBRARY,
        densities=(0.2,),
        parts=(
            Part(
                tuple(
                    one.at(1e-3)
                    for one in (
                        *entrants("fedrts", "fedrts_early"),
                        Entrant("feddst", "feddst", {"method_options.merge": "plain", "method_options.adjust_after": 0}),
                        Entrant("fedmef", "fedmef", {"method_options.bae_in": "all", "method_options.theta_low": "all"}),
                        Entrant("fedtiny", "fedtiny", {"method_options.abns": False}),
                    )
                ),
                range(2),
            ),
        ),
        rates=(0.0003, 0.001, 0.003),
    ),
}
"""Questions whose cells `evidence.py play` plays, in this order."""
