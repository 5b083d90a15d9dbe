"""What holds for every registered method whatever an arm is: `topology.unit` is `kernel` or a block."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedrts
from fedrts import costs, methods
from fedrts.client import steps
from fedrts.client.envelope import decode_reply, encode_reply
from fedrts.engines import batched
from fedrts.errors import InputError, Note
from fedrts.methods.fedrts import FedRTS
from fedrts.server import rounds
from fedrts.server.guard import faults
from fedrts.sparse import budget, importance
from fedrts.testing.agreement import OFTEN, agree, both, unequal
from fedrts.testing.federations import toy
from fedrts.wire.fields import Selection
from helping import ask, order_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not divide:fedrts.errors.Note")

KERNEL: dict[str, Any] = {"model": "cnn", "model_options": {"width": 4}, "unit": "kernel"}
BLOCK: dict[str, Any] = {"model": "mlp", "model_options": {"hidden": [16, 16]}, "unit": "block:4x4"}
MIXED: dict[str, Any] = {"model": "cnn", "model_options": {"width": 6}, "unit": "block:2×2"}
UNITS = [pytest.param(KERNEL, id="kernel"), pytest.param(BLOCK, id="4×4")]
SPARSE = [name for name in methods.names() if not methods.get(name).dense]
BANDITS = ("fedrts", "fedcucb", "fedrts_early", "fedrts_trial")


def of(case: dict[str, Any], method: str, make=toy, **keywords):
    topology = {"unit": case["unit"], **keywords.pop("topology", {})}
    return make(method, case["model"], model_options=case["model_options"], topology=topology, **keywords)


def played(run):
    found = list(rounds.play(run.plan, run.method.begin(run.setup), -1))
    return [step.state for step in found if step.record.round >= 0], [step.record for step in found if step.record.round >= 0]


@pytest.mark.parametrize("case", [*UNITS, pytest.param(MIXED, id="mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", SPARSE)
def test_masks_have_whole_arms_within_the_budget(method, case):
    run = of(case, method)
    sizes = run.layout.sizes
    states, records = played(run)
    assert sizes.grouped
    begun = states[0].mask.counts
    assert budget.links_to_keep(run.layout, 0.5) - max(sizes.each) < sum(begun) <= budget.links_to_keep(run.layout, 0.5)
    for before, after, record in zip(states, states[1:], records[1:], strict=False):
        assert torch.equal(sizes.touched(after.mask.bits), after.mask.bits)
        assert after.mask.counts == begun
        assert record.density <= 0.5
        assert not record.rejected
        assert after.weights[: run.layout.links][~after.mask.bits].count_nonzero() == 0
        assert record.outer or after.mask == before.mask
    if methods.get(method).steady(run.method) is None:
        assert any(record.links_changed for record in records)
    if method in BANDITS and (belief := run.method.belief(states[-1])) is not None:
        assert belief.shape == (run.layout.arms,)


@pytest.mark.parametrize("case", UNITS)
@pytest.mark.parametrize("method", SPARSE)
def test_messages_survive_the_wire_and_the_guard(method, case):
    run = of(case, method)
    state = run.method.begin(run.setup)
    if run.method.exchanges(run.plan.round(-1, state.mask)):
        state = rounds.play_round(run.plan, state, -1).state
    samples = dict(enumerate(run.plan.samples))
    for number, exchange in enumerate(run.plan.exchanges(run.plan.round(0, state.mask))):
        order = order_of(run, exchange, state, 0, number)
        for reply in run.plan.engine.run(order, [0, 3]):
            data = encode_reply(reply, order)
            again = decode_reply(data, order)
            assert encode_reply(again, order) == data
            assert faults([again], order, run.plan.guard, samples) == [None]


@pytest.mark.parametrize("method", ["fedrts", "fedrts_early"])
def test_the_guard_counts_arms(method):
    run = of(BLOCK, method)
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    order = order_of(run, exchange, state, 0)
    (reply,) = run.plan.engine.run(order, [0])
    votes, samples, arms = reply.message["votes"], dict(enumerate(run.plan.samples)), state.mask.arms
    assert votes.size == run.layout.arms
    assert len(votes.indices) == sum(run.layout.sizes.in_arms(order.round.quota)) > 0

    def fault(indices: list[int]) -> str | None:
        values = None if votes.values is None else torch.ones(len(indices))
        changed = replace(votes, indices=torch.tensor(sorted(indices)), values=values)
        return faults([replace(reply, message={**reply.message, "votes": changed})], order, run.plan.guard, samples)[0]

    named = votes.indices.tolist()
    assert fault(named) is None
    assert fault([*named[1:], int(arms.active[0])]) == "an active link is named"
    assert fault([*named[1:], run.layout.arms]) == "a link is named that does not exist"
    assert "are named where" in str(fault(named[1:]))
    elsewhere = next(arm for arm in arms.inactive.tolist() if arm not in named and arm < arms.sizes[0])
    assert "links named where" in str(fault([*named[:-1], elsewhere]))
    links = replace(votes, size=run.layout.links)
    found = faults([replace(reply, message={**reply.message, "votes": links})], order, run.plan.guard, samples)[0]
    assert found == "'gradient' is not a choice of this model's links"


@pytest.mark.parametrize("case", UNITS)
def test_a_round_of_fedrts_written_out_arm_by_arm(case):
    """Eq. 3 to 6 with an arm's norm for a link's magnitude, in an outer round."""
    run = of(case, "fedrts")
    state, sizes = run.method.begin(run.setup), run.layout.sizes
    current = run.plan.round(0, state.mask)
    (exchange,) = run.plan.exchanges(current)
    replies = ask(run, exchange, state, 0, clients := rounds_clients(run))
    after = rounds.play_round(run.plan, state, 0).state
    members = [(sizes.arm_of == arm).nonzero().squeeze(-1) for arm in range(run.layout.arms)]
    layer_of = [layer for layer, number in enumerate(sizes.arms) for _ in range(number)]

    def core(weights: torch.Tensor) -> set[int]:
        """The arms of largest norm in each layer, as many as κ^l links make."""
        full = state.mask.expand(weights)
        found = set()
        for layer, (links, each) in enumerate(zip(current.core, sizes.each, strict=True)):
            own = [arm for arm, where in enumerate(layer_of) if where == layer and state.mask.bits[members[arm][0]]]
            found |= set(sorted(own, key=lambda arm: -float(full[members[arm]].norm()))[: links // each])
        return found

    total = sum(reply.samples for reply in replies)
    mean = sum(reply.message["weights"].double() * reply.samples for reply in replies) / total
    aggregate, own = core(mean.float()), [core(reply.message["weights"]) for reply in replies]
    for arm, links in enumerate(members):
        if state.mask.bits[links[0]]:
            x = 0.5 * (arm in aggregate) + 0.5 * sum(r.samples * (arm in c) for r, c in zip(replies, own, strict=True)) / total
        else:
            x = 0.25 + 0.5 * sum(r.samples * (arm in r.message["votes"].indices.tolist()) for r in replies) / total
        assert float(after["alpha"][arm]) == pytest.approx(1 + 10 * x, abs=1e-5)
        assert float(after["beta"][arm]) == pytest.approx(1 + 10 * (1 - x), abs=1e-5)
    assert len(clients) == 3


def rounds_clients(run) -> list[int]:
    return sorted(run.plan.sample(0))


def test_a_client_names_the_arms_of_largest_gradient():
    run = of(BLOCK, "fedrts")
    state = run.method.begin(run.setup)
    field = run.method.votes(run.plan.round(0, state.mask))
    gradient = torch.randn(run.layout.links, generator=torch.Generator().manual_seed(0))
    frame = order_of(run, run.plan.exchanges(run.plan.round(0, state.mask))[0], state, 0).frame
    chosen = field.take({"gradient": gradient}, frame)
    assert isinstance(chosen, Selection)
    norms = torch.stack([gradient[run.layout.sizes.arm_of == arm].norm() for arm in range(run.layout.arms)])
    begin = 0
    for number, k in zip(run.layout.sizes.arms, run.layout.sizes.in_arms(field.k), strict=True):
        free = [arm for arm in range(begin, begin + number) if not state.mask.arms.bits[arm]]
        best = sorted(sorted(free, key=lambda arm: -float(norms[arm]))[:k])
        assert [arm for arm in chosen.indices.tolist() if begin <= arm < begin + number] == best
        begin += number


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", UNITS)
@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name in ("fedrts", "feddst") else pytest.mark.slow) for name in SPARSE])
def test_clients_side_by_side_are_clients_one_after_the_other(method, case):
    agree(*both(of(case, method, unequal, topology=OFTEN)))


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        ("fedrts", {"method_options": {"scope": "global"}}),
        ("fedrts_trial", {"method_options": {"scope": "global"}}),
        ("fedrts", {"method_options": {"score": "fisher"}}),
        ("fedrts", {"topology": {"density_start": 0.9}}),
        ("prunefl", {"method_options": {"adaptive": True}}),
        ("fedrts_no_ts", {"method_options": {"score": "outcome"}}),
        ("fedrts_no_ts", {"method_options": {"score": "blend"}}),
        ("fedsgc", {"method_options": {"residual": True}}),
        ("fedtiny", {"method_options": {"group": "layer"}}),
        ("snip", {"method_options": {"scope": "erk"}}),
        ("fedrts", {"topology": {"init_mask": "magnitude"}}),
        ("fedrts", {"secure": {"aggregation": True}}),
        ("fedrts", {"secure": {"aggregation": True, "votes_among": 0.5}}),
        ("fedrts", {"privacy": {"index_epsilon": 1.0}}),
        ("feddst", {"wire": {"value_type": "int4"}}),
    ],
)
@pytest.mark.parametrize("case", [pytest.param(MIXED, id="mixed")])
def test_options_keep_arms_whole(method, case, keywords):
    run = of(case, method, **{"engine": "serial", **keywords})
    states, records = played(run)
    for state, record in zip(states, records, strict=True):
        assert torch.equal(run.layout.sizes.touched(state.mask.bits), state.mask.bits)
        assert record.density <= (0.9 if "density_start" in keywords.get("topology", {}) else 0.5)
        assert not record.rejected
    assert records[-1].density <= 0.5


def test_positions_and_votes_travel_for_fewer_bytes():
    def sizes(unit: str) -> dict[tuple[str, str], tuple[float, float]]:
        found = costs.cost(
            model="cnn", method="fedrts", density=0.2, input_shape=(3, 32, 32), classes=10, samples=20, topology={"unit": unit}
        )
        return {(row.round, row.case): (row.upload_bytes, row.download_bytes) for row in found.rows if row.accounting == "measured"}

    links, kernels = sizes("link"), sizes("kernel")
    uploads = [{name: up for (name, _), (up, _) in found.items()} for found in (links, kernels)]
    votes = [found["outer"] - found["inner"] for found in uploads]
    assert 0 < votes[1] < votes[0] / 4
    masks = []
    for found in (links, kernels):
        same = [downloaded for (name, _), (_, downloaded) in found.items() if name == "inner"]
        masks.append(max(same) - min(same))
    assert 0 < masks[1] < masks[0] / 4


def test_a_dense_method_has_no_arms():
    assert not of(KERNEL, "fedavg").layout.sizes.grouped


def test_layers_that_a_block_does_not_divide_are_said_once():
    told = "topology.unit = block:2×2: layers that it does not divide have arms of their own: '0.0.weight' in blocks of 2×1"
    with pytest.warns(Note, match=f"^{re.escape(told)}$"):
        of(MIXED, "fedrts")


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    update = FedRTS.update

    def stops(method, state, mean, round, rng):
        if round.index == 3:
            raise Stop
        return update(method, state, mean, round, rng)

    settings: dict[str, Any] = {"data": "toy_images", "model": "cnn", "model_options": {"width": 4}, "density": 0.5, "rounds": 6}
    settings |= {"recipe": "paper", "clients": {"total": 5, "per_round": 3, "partition": "iid", "min_size": 1}, "device": "cpu"}
    settings |= {"train": {"epochs": 1, "batch_size": 8, "lr": 0.1}, "topology": {"interval": 2, "end": 5, "unit": "kernel"}}
    settings |= {"checkpoint": {"every": 1}, "engine": "serial"}
    whole = fedrts.run(**settings, out=str(tmp_path / "whole"))
    monkeypatch.setattr(FedRTS, "update", stops)
    with pytest.raises(Stop):
        fedrts.run(**settings, out=str(tmp_path / "cut"))
    monkeypatch.setattr(FedRTS, "update", update)
    resumed = fedrts.resume(tmp_path / "cut")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)
    assert (tmp_path / "cut" / "topology.jsonl").read_bytes() == (tmp_path / "whole" / "topology.jsonl").read_bytes()


def silent(layout, weights, mask) -> int:
    """How many units have active links, and nothing but zeros on them."""
    sizes, found = list(layout.sizes), 0
    for entry, bits, part in zip(layout.layers, mask.bits.split(sizes), weights[: layout.links].split(sizes), strict=True):
        rows = entry.shape[0]
        found += int((bits.view(rows, -1).any(1) & ~(part.view(rows, -1) != 0).any(1)).sum())
    return found


@pytest.mark.parametrize("method", ["fedrts", "prunefl"])
def test_a_new_mask_leaves_no_unit_with_links_that_are_all_0(method, monkeypatch):
    """Behind a norm its gradient would be hundreds of times too large, and the guard would refuse what comes of it."""

    def left() -> int:
        run = of({**KERNEL, "model_options": {"width": 16}}, method, density=0.15, topology={"interval": 1, "end": 5})
        states, _ = played(run)
        return sum(silent(run.layout, state.weights, state.mask) for state in states)

    assert left() == 0
    monkeypatch.setattr(rounds, "start_anew", lambda *given: None)
    assert left() > 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("engine", "place"), [("serial", steps), ("batched", batched)])
def test_units_start_anew_on_a_clients_own_mask(engine, place, monkeypatch):
    """The client rewires after its last step, so that what it sends is what a unit starts with."""

    def left() -> int:
        options = {"method_options": {"adjust_after": 1.0}, "topology": {**OFTEN, "adjust": 1.0}}
        run = of(KERNEL, "feddst", density=0.3, engine=engine, **options)
        state = run.method.begin(run.setup)
        (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
        owned = [reply.message["weights"] for reply in ask(run, exchange, state, 0, [0, 1])]
        return sum(silent(run.layout, own.mask.expand(own.values), own.mask) for own in owned)

    assert left() == 0
    monkeypatch.setattr(place, "start_anew", lambda *given: None)
    assert left() > 0


def test_importance_of_an_arm_is_the_norm_of_that_of_its_links():
    run = of(KERNEL, "fedrts")
    state = run.method.begin(run.setup)
    current = run.plan.round(0, state.mask)
    values = torch.randn(2, len(state.values), generator=torch.Generator().manual_seed(0))  # two clients side by side
    found = run.method.core({"weights": values}, current)
    assert found.shape == (2, state.mask.arms.number)
    norms = importance.magnitude(values[:, : state.mask.number]).view(2, -1, 9).norm(dim=-1)
    begin = 0
    for active, core in zip(state.mask.arms.counts, run.layout.sizes.in_arms(current.core), strict=True):
        part = norms[:, begin : begin + active]
        assert torch.equal(found[:, begin : begin + active].sum(1), torch.tensor([core, core]))
        assert torch.equal(
            part.argsort(descending=True)[:, :core].sort().values, found[:, begin : begin + active].nonzero()[:, 1].view(2, -1)
        )
        begin += active


def test_a_unit_that_nobody_knows_is_refused():
    with pytest.raises(InputError, match=r"topology\.unit must be link, kernel, or block:R×C"):
        toy(topology={"unit": "blocks"})
