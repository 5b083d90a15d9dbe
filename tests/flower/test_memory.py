"""Error feedback on nodes: what an upload has not told stays where it is, and the server says which upload counted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from fedrts.client.order import Reply
from fedrts.flower import WORK, messages
from fedrts.flower.memory import KEPT, Memories, Shelf
from fedrts.flower.node import Worker
from fedrts.flower.state import Records
from fedrts.logs import LOST
from fedrts.runs.build import Assembled
from fedrts.server.client_records import ClientRecords
from fedrts.server.rounds import play
from linkhere import LinkHere, connected, experiment, nobody_waits, played, two_nodes

FED: dict[str, Any] = {"wire": {"value_type": "int2", "feedback": True}}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("fedrts", FED),
    ("fedavg", FED),
    ("fedtopk", {}),
    ("fedtopk", {"method_options": {"values": "int4", "share": 0.2}}),
]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


def long(method: str, keywords: dict[str, Any]) -> Assembled:
    """Rounds enough for clients to be asked again after others."""
    return experiment(method, **{"rounds": 7, "clients": {"per_round": 3}, **keywords})


def memories_of(link: LinkHere) -> dict[int, Tensor | None]:
    """The newest memory of every client."""
    found = {}
    for records in link.records.values():
        for client in range(5):
            if entries := records.memories.of(client):
                found[client] = records.memories.shelf.get(entries[-1].file)
    return found


@pytest.mark.parametrize(("method", "keywords"), KINDS)
def test_nodes_remember_what_simulated_clients_do(method: str, keywords: dict[str, Any]):
    """The same bits and bytes as the serial engine, and at the end the same memories."""
    run, link = long(method, keywords), two_nodes()
    ready, remote, local = connected(run, link), ClientRecords.of(run.plan.guard), ClientRecords.of(run.plan.guard)
    steps = list(play(ready.plan, run.method.begin(run.setup), -1, remote))
    expected = list(play(run.plan, run.method.begin(run.setup), -1, local))
    lines, wanted = ([{**step.record.as_dict(), "seconds": 0} for step in some] for some in (steps, expected))
    assert lines == wanted
    assert torch.equal(steps[-1].state.values, expected[-1].state.values)
    assert link.down == sum(line["download_bytes"] for line in lines)
    assert not remote.residuals, "the server knows names alone"
    assert sorted(remote.kept) == sorted(local.residuals) == list(range(5))
    found = memories_of(link)
    assert all(torch.equal(found[client], residual) for client, residual in local.residuals.items())  # type: ignore[arg-type]
    assert any(residual.count_nonzero() for residual in local.residuals.values())


def spoiling(client: int, in_round: int) -> Any:
    """A node whose answer for a client in one round is cut off."""

    def answer(message: Message, worker: Worker) -> Message:
        reply = worker.reply(message)
        if message.metadata.message_type != WORK:
            return reply
        facts, blobs = messages.opened(reply)
        if client in blobs and messages.opened(message)[0]["round"] == in_round:
            blobs[client] = blobs[client][:-5]
        return Message(messages.content(facts, blobs), reply_to=message)

    return answer


def rejecting(run: Assembled, client: int, in_round: int) -> Assembled:
    """The same in the serial engine."""
    engine = run.plan.engine

    class Rejecting:
        label, evaluate = engine.label, engine.evaluate

        def run(self, order: Any, clients: Any) -> Any:
            for reply in engine.run(order, clients):
                assert isinstance(reply, Reply)
                spoiled = reply.client == client and order.round.index == in_round
                yield replace(reply, samples=reply.samples + 1) if spoiled else reply

    return replace(run, plan=replace(run.plan, engine=Rejecting()))


@pytest.mark.parametrize(("method", "keywords"), KINDS)
def test_a_reply_that_did_not_count_is_not_remembered(method: str, keywords: dict[str, Any]):
    run, link = long(method, keywords), two_nodes()
    expected, _ = played(run)
    asked = [line["clients"] for line in expected]
    index, client = next((i, c) for i, some in enumerate(asked) for c in some if i > 0 and any(c in more for more in asked[:i]))
    assert any(client in more for more in asked[index + 1 :]), "it is asked again"
    node = next(node for node, worker in link.workers.items() if client in worker.host.clients)
    link.manners[node] = spoiling(client, index)
    lines, state = played(connected(run, link))
    reference = played(rejecting(run, client, index))[1]
    assert [entry["client"] for line in lines for entry in line["rejected"]] == [client]
    assert torch.equal(state.values, reference.values)
    assert not torch.equal(state.values, played(run)[1].values)


@pytest.mark.parametrize(("method", "keywords"), KINDS)
def test_nodes_that_were_killed_go_on_from_their_folder(tmp_path: Path, method: str, keywords: dict[str, Any]):
    """Both nodes begin anew in every round; what they remember is on disk."""
    run, link = long(method, keywords), two_nodes()
    restarted = set()

    def mortal(node: int, clients: list[int]) -> Any:
        def answer(message: Message, worker: Worker) -> Message:
            if message.metadata.message_type == WORK:
                index = messages.opened(message)[0]["round"]
                if (node, index) not in restarted:
                    restarted.add((node, index))
                    link.records[node].close()
                    link.records[node] = Records.of(tmp_path / str(node))
                    link.start(node, clients)
            return link.workers[node].reply(message)

        return answer

    for node, clients in ((7, [0, 2, 4]), (8, [1, 3])):
        link.records[node] = Records.of(tmp_path / str(node))
        link.start(node, clients, mortal(node, clients))
    lines, state = played(connected(run, link))
    expected, reference = played(run)
    assert len(restarted) > 7
    assert torch.equal(state.values, reference.values)
    assert [line["upload_bytes"] for line in lines] == [line["upload_bytes"] for line in expected]
    assert all(file.stat().st_mode & 0o077 == 0 for node in (7, 8) for file in (tmp_path / str(node) / "memory").iterdir())


@pytest.mark.parametrize("back", [1, 3])
@pytest.mark.parametrize(("method", "keywords"), KINDS)
def test_a_server_that_goes_back_finds_the_memories_of_then(method: str, keywords: dict[str, Any], back: int):
    """Killed before a checkpoint was written, it plays rounds again that nodes have seen: to the same bits."""
    run, link = long(method, keywords), two_nodes()
    ready, ledger, state = connected(run, link), ClientRecords.of(run.plan.guard), run.method.begin(run.setup)
    saved = []
    for step in play(ready.plan, state, -1, ledger):
        saved.append((step.state, step.record.round + 1, {name: tensor.clone() for name, tensor in ledger.tensors().items()}))
        if step.record.round == 4:
            break
    state, first, tensors = saved[-1 - back]
    ledger = ClientRecords.restored(tensors, state.mask.sizes, run.plan.guard, "cpu")
    again = list(play(connected(run, link).plan, state, first, ledger))
    assert torch.equal(again[-1].state.values, played(run)[1].values)
    assert not [line for line in link.said if "not told" in line]


@pytest.mark.parametrize("spoil", ["other numbers", "a later round", "nothing"])
def test_a_node_whose_model_is_not_the_servers_asks_for_the_whole(spoil: str):
    """As after a server went back and played a round again to another end."""
    run, link = long("fedtopk", {}), two_nodes()

    def misled(message: Message, worker: Worker) -> Message:
        memories = worker.records.memories
        if message.metadata.message_type == WORK and (held := memories.model()) is not None:
            memories.shelf.held = {name: tensor for name, tensor in memories.shelf.held.items() if not name.startswith("model-")}
            if spoil != "nothing":
                memories.keep_model(held[0] + 99 * (spoil == "a later round"), held[1] + 1e-3 * (spoil == "other numbers"))
        return worker.reply(message)

    link.manners[7] = misled
    lines, state = played(connected(run, link))
    expected, reference = played(run)
    assert torch.equal(state.values, reference.values)
    assert [line["rejected"] for line in lines] == [[]] * 7
    assert link.down == sum(line["download_bytes"] for line in lines) > sum(line["download_bytes"] for line in expected)


def test_a_memory_that_is_lost_is_said_at_both_ends():
    run, link = long("fedavg", FED), two_nodes()
    ready, ledger = connected(run, link), ClientRecords.of(run.plan.guard)
    first = next(play(ready.plan, run.method.begin(run.setup), 0, ledger))
    for records in link.records.values():
        records.memories.shelf.held.clear()
    list(play(ready.plan, first.state, 1, ledger))
    lost = [line for line in link.said if "not told" in line]
    assert len(lost) == 2 * 3, lost
    assert sum(line.startswith(LOST) for line in lost) == 3


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_an_older_node_that_remembers_nothing_does_not_count():
    run, link = experiment("fedtopk", guard={"strikes": 9}), two_nodes()

    def older(message: Message, worker: Worker) -> Message:
        reply = worker.reply(message)
        if message.metadata.message_type != WORK:
            return reply
        facts, blobs = messages.opened(reply)
        return Message(messages.content({**facts, "memories": [], "remembering": []}, blobs), reply_to=message)

    link.manners[8] = older
    lines, _ = played(connected(run, link))
    reasons = {entry["client"]: entry["reason"] for line in lines for entry in line["rejected"]}
    assert set(reasons) == {1, 3}
    assert all("install" in reason for reason in reasons.values())


# -- the shelf --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "folder"])
def memories(request: pytest.FixtureRequest, tmp_path: Path) -> Memories:
    return Memories(Shelf(tmp_path / "memory" if request.param == "folder" else None), lambda left: int(left.sum() * 8))


def kept(memories: Memories, client: int) -> list[int]:
    return [entry.name for entry in memories.of(client)]


def test_only_what_can_still_be_named_is_kept(memories: Memories):
    names = [memories.keep(3, index, torch.full((2,), float(index))) for index in range(3)]
    assert memories.keep(4, 0, torch.ones(2)) == 16
    assert kept(memories, 3) == names
    recalled = memories.recalled(3, 3, names[1])
    assert recalled is not None
    assert recalled.tolist() == [1, 1]
    assert kept(memories, 3) == names[:2], "the upload of round 2 did not count"
    assert memories.recalled(3, 4, None) is None
    assert kept(memories, 3) == []
    assert kept(memories, 4) == [16], "others' memories are theirs"


def test_a_round_that_is_tried_again_loses_nothing(memories: Memories):
    before = memories.keep(0, 1, torch.zeros(2))
    first, second = memories.keep(0, 5, torch.ones(2)), memories.keep(0, 5, 2 * torch.ones(2))
    assert memories.recalled(0, 5, before) is not None
    assert kept(memories, 0) == [before, first, second]
    assert memories.recalled(0, 6, first) is not None
    assert kept(memories, 0) == [before, first]


def test_there_is_an_end_to_what_is_kept(memories: Memories):
    """Whatever a server asks: of one round, or of many."""
    for index in range(20):
        memories.recalled(0, index, memories.keep(0, index, torch.full((2,), float(index))))
    assert len(kept(memories, 0)) == KEPT + 1
    for number in range(20):
        memories.keep(0, 30, torch.full((2,), 100.0 + number))
        memories.recalled(0, 30, 19 * 16)
    assert len(kept(memories, 0)) == 2 * KEPT + 1


def test_a_damaged_memory_is_none(tmp_path: Path):
    memories = Memories(Shelf(tmp_path / "memory"), lambda left: int(left.sum() * 8))
    name = memories.keep(0, 1, torch.ones(2))
    (file,) = (tmp_path / "memory").iterdir()
    data = file.read_bytes()
    for damaged in (data[:-3], b"", data[:-1] + b"\x41"):
        file.write_bytes(damaged)
        assert memories.recalled(0, 2, name) is None
    file.write_bytes(data)
    assert memories.recalled(0, 2, name) is not None
