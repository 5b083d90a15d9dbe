"""What we count on of Flower's inside, piece by piece: where another version differs, this says what changed.

Every expectation is data; `differences` compares it with the Flower that is installed.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import yaml
from flwr.app import Message

from fedrts import flower
from fedrts.flower import inside, untested
from fedrts.flower.messages import content, opened

ROOT = Path(__file__).parents[2]

CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "FleetHttpClient": (("base_url",), ("interceptors", "verify")),
    "ControlHttpClient.from_server_address": (("server_address", "insecure", "root_certificates"), ("interceptors",)),
    "RuntimeHttpClient.from_server_address": (("server_address", "insecure", "root_certificates"), ("interceptors",)),
    "RuntimeVersionHttpInterceptor": ((), ("component_name",)),
    "SuperExecAuthHttpInterceptor": ((), ("master_secret", "protected_methods")),
    "NodeAuthHttpInterceptor": (("private_key", "public_key"), ()),
    "HttpGrid": (("address", "insecure", "certificate"), ("token",)),
    "HttpGrid.get_nodes": (("self",), ()),
    "HttpGrid.push_messages": (("self", "messages"), ()),
    "HttpGrid.set_run": (("self", "run"), ()),
    "HttpGrid.close": (("self",), ()),
    "HeartbeatSender": (("heartbeat_fn",), ()),
    "HeartbeatSender.start": (("self",), ()),
    "HeartbeatSender.stop": (("self",), ()),
    "make_task_heartbeat_fn_http": (("client",), ()),
    "make_pull_object_fn_protobuf": (("pull", "node", "run_id"), ()),
    "make_push_object_fn_protobuf": (("push", "node", "run_id", "session_id"), ()),
    "make_confirm_message_received_fn_protobuf": (("confirm", "node", "run_id"), ()),
    "push_objects": (("objects", "push_object_fn"), ("object_ids_to_push",)),
    "inflate_object_from_contents": (("object_id", "contents"), ()),
    "iterate_object_tree": (("tree",), ()),
    "get_object_head_values_from_object_content": (("content",), ()),
    "get_object_body": (("content", "kind"), ()),
    "get_object_tree": (("message",), ()),
    "get_all_nested_objects": (("message",), ()),
    "no_object_id_recompute": ((), ()),
    "remove_content_from_message": (("message",), ()),
    "message_to_proto": (("message",), ()),
    "message_from_proto": (("proto",), ()),
    "run_from_proto": (("proto",), ()),
    "fab_to_proto": (("fab",), ()),
    "build_fab_from_files": (("files",), ()),
    "Fab": (("hash", "content", "verifications"), ()),
    "generate_key_pairs": ((), ()),
    "public_key_to_bytes": (("key",), ()),
    "bytes_to_public_key": (("pem",), ()),
    "sign_message": (("key", "text"), ()),
    "verify_signature": (("key", "text", "signature"), ()),
    "now": ((), ()),
}
"""Names in `inside` and how we call them: positional arguments, keywords."""

FIELDS = {
    "fleet_pb2.RegisterNodeFleetRequest": {"public_key": "bytes"},
    "fleet_pb2.ActivateNodeRequest": {"public_key": "bytes", "heartbeat_interval": "double"},
    "fleet_pb2.ActivateNodeResponse": {"node_id": "uint64"},
    "fleet_pb2.DeactivateNodeRequest": {"node_id": "uint64"},
    "fleet_pb2.PullMessagesRequest": {"node": "Node"},
    "fleet_pb2.PullMessagesResponse": {"messages_list": "[Message]", "message_object_trees": "[ObjectTree]"},
    "fleet_pb2.PushMessagesRequest": {
        "node": "Node",
        "messages_list": "[Message]",
        "message_object_trees": "[ObjectTree]",
        "clientapp_runtime_list": "[double]",
    },
    "fleet_pb2.PushMessagesResponse": {"objects_to_push": "[string]", "session_id": "string"},
    "heartbeat_pb2.SendNodeHeartbeatRequest": {"node": "Node", "heartbeat_interval": "double"},
    "heartbeat_pb2.SendNodeHeartbeatResponse": {"success": "bool"},
    "message_pb2.ConfirmMessageReceivedRequest": {"node": "Node", "run_id": "uint64", "message_object_id": "string"},
    "message_pb2.ObjectTree": {"object_id": "string", "children": "[ObjectTree]"},
    "message_pb2.Message": {"metadata": "Metadata", "error": "Error"},
    "message_pb2.Metadata": {
        "run_id": "uint64",
        "message_id": "string",
        "src_node_id": "uint64",
        "dst_node_id": "uint64",
        "reply_to_message_id": "string",
        "ttl": "double",
        "created_at": "double",
        "message_type": "string",
    },
    "runtime_pb2.PullAppMessagesRequest": {"message_ids": "[string]"},
    "runtime_pb2.PullAppMessagesResponse": {"messages_list": "[Message]", "message_object_trees": "[ObjectTree]"},
    "runtime_pb2.AcquireTaskRequest": {"supported_task_types": "[string]"},
    "runtime_pb2.AcquireTaskResponse": {"token": "string"},
    "runtime_pb2.PullTaskInputResponse": {"task_id": "uint64", "run": "Run", "context": "Context"},
    "control_pb2.StartRunRequest": {"fab": "Fab"},
    "control_pb2.StartRunResponse": {"run_id": "uint64"},
    "control_pb2.RegisterNodeRequest": {"public_key": "bytes", "name": "string"},
    "control_pb2.RegisterNodeResponse": {"node_id": "uint64"},
    "control_pb2.UnregisterNodeRequest": {"node_id": "uint64"},
    "NodeInfo": {"node_id": "uint64", "public_key": "bytes", "last_activated_at": "string"},
    "Node": {"node_id": "uint64"},
}
"""Messages and those of their fields that we read or write."""

ENDPOINTS = {
    "FleetHttpClient": {
        "RegisterNode": "register-node",
        "ActivateNode": "activate-node",
        "DeactivateNode": "deactivate-node",
        "SendNodeHeartbeat": "send-node-heartbeat",
        "PullMessages": "pull-messages",
        "PushMessages": "push-messages",
        "PullObject": "pull-object",
        "PushObject": "push-object",
        "ConfirmMessageReceived": "confirm-message-received",
    },
    "ControlHttpClient": {"StartRun": "start-run", "RegisterNode": "register-node", "UnregisterNode": "unregister-node"},
    "RuntimeHttpClient": {
        "AcquireTask": "acquire-task",
        "PullTaskInput": "pull-task-input",
        "PullMessages": "pull-messages",
        "PullObject": "pull-object",
        "ConfirmMessageReceived": "confirm-message-received",
    },
}
"""The calls of Flower's clients, and the last word of their paths."""
PREFIXES = {"FleetHttpClient": inside.FLEET, "ControlHttpClient": "/v1/control/", "RuntimeHttpClient": "/v1/runtime/"}

READ_THERE = {
    "flwr.superlink.routers.fleet.node_auth:authenticate_node": {
        "SYSTEM_TIME_TOLERANCE",
        "TIMESTAMP_TOLERANCE",
        "bytes_to_public_key",
        "verify_signature",
    },
    "flwr.superlink.routers.fleet.router:fleet_activate_node": {"fleet_handlers", "activate_node"},
    "flwr.superlink.servicer.fleet.fleet_handlers:activate_node": {"get_node_id_by_public_key"},
    "flwr.superlink.grid.http_grid:HttpGrid._connect": {"_retry_invoker"},
}
"""Functions of Flower, and the names that they look up when they run: what we put in the place of these takes effect."""

VALUES = {
    "flwr.common.constant:SUPERLINK_NODE_ID": 1,
    "flwr.common.constant:TIMESTAMP_HEADER": inside.TIME_HEADER.decode(),
    "flwr.supercore.constant:FLEET_HTTP_PUBLIC_KEY_HEADER": inside.KEY_HEADER.decode(),
    "flwr.supercore.constant:FLEET_HTTP_SIGNATURE_HEADER": inside.SIGNATURE_HEADER.decode(),
    "flwr.supercore.constant:TaskType.SERVER_APP": "flwr-serverapp",
}


def differences(
    look: Callable[[str], Any],
    calls: dict[str, Any] = CALLS,
    fields: dict[str, Any] = FIELDS,
    endpoints: dict[str, Any] = ENDPOINTS,
    read: dict[str, Any] = READ_THERE,
    values: dict[str, Any] = VALUES,
) -> Iterator[str]:
    """A line for everything that is not as we count on it."""
    for name, (places, keywords) in calls.items():
        try:
            inspect.signature(look(name)).bind(*places, **dict.fromkeys(keywords))
        except (AttributeError, TypeError) as error:
            yield f"{name}({', '.join((*places, *(f'{word}=' for word in keywords)))}): {error}"
    for name, wanted in fields.items():
        try:
            found = {field.name: _type(field) for field in look(name).DESCRIPTOR.fields}
        except AttributeError as error:
            yield f"{name}: {error}"
            continue
        for field, kind in wanted.items():
            if found.get(field) != kind:
                yield f"{name}.{field}: {found.get(field, 'no such field')}, we count on {kind}"
    for client, methods in endpoints.items():
        for method, word in methods.items():
            try:
                path = _path(look(client), method)
            except (AttributeError, TypeError) as error:
                yield f"{client}.{method}: {error}"
                continue
            if path != PREFIXES[client] + word:
                yield f"{client}.{method}: at {path}, we count on {PREFIXES[client] + word}"
    for place, names in read.items():
        try:
            missing = names - set(_there(place).__code__.co_names)
        except (AttributeError, ImportError) as error:
            yield f"{place}: {error}"
            continue
        for name in sorted(missing):
            yield f"{place}: does not look up {name} any more"
    for place, value in values.items():
        try:
            if (here := _there(place)) != value:
                yield f"{place}: {here!r}, we count on {value!r}"
        except (AttributeError, ImportError) as error:
            yield f"{place}: {error}"


def here(name: str) -> Any:
    """A name of `inside`, perhaps with dots."""
    found: Any = inside
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _there(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return getattr(found, "func", found)


_KINDS = {1: "double", 4: "uint64", 3: "int64", 8: "bool", 9: "string", 12: "bytes", 13: "uint32", 5: "int32", 14: "enum"}


def _type(field: Any) -> str:
    kind = field.message_type.name if field.message_type is not None else _KINDS.get(field.type, str(field.type))
    repeated = getattr(field, "is_repeated", None)
    if repeated is None:  # protobuf before 6
        repeated = field.label == field.LABEL_REPEATED
    return f"[{kind}]" if repeated else kind


def _path(client: Any, method: str) -> str:
    """Where a client of Flower sends this request."""
    sent: dict[str, Any] = {}
    stub = object.__new__(client)
    stub._unary_unary = lambda **told: sent.update(told)
    getattr(stub, method)(None)
    return str(sent["path"])


def test_flower_is_as_we_count_on_it():
    found = list(differences(here))
    version, lines = metadata.version("flwr"), "\n".join(found)
    assert not found, f"Flower {version} has changed inside, mend src/fedrts/flower/inside.py:\n{lines}"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"calls": {"push_objects": (("objects", "push_object_fn"), ("only",))}}, "push_objects(objects, push_object_fn, only=): "),
        ({"calls": {"vanished": ((), ())}}, "vanished(): module 'fedrts.flower.inside' has no attribute 'vanished'"),
        ({"fields": {"Node": {"node_id": "string"}}}, "Node.node_id: uint64, we count on string"),
        ({"fields": {"Node": {"name": "string"}}}, "Node.name: no such field, we count on string"),
        ({"endpoints": {"FleetHttpClient": {"ActivateNode": "activate"}}}, "at /v1/fleet/activate-node, we count on /v1/fleet/activate"),
        ({"endpoints": {"FleetHttpClient": {"Vanished": "vanished"}}}, "FleetHttpClient.Vanished: "),
        ({"read": {"flwr.superlink.routers.fleet.node_auth:authenticate_node": {"gone"}}}, "does not look up gone any more"),
        ({"values": {"flwr.common.constant:SUPERLINK_NODE_ID": 2}}, "flwr.common.constant:SUPERLINK_NODE_ID: 1, we count on 2"),
    ],
)
def test_a_change_is_named(changed, words):
    nothing: dict[str, Any] = {"calls": {}, "fields": {}, "endpoints": {}, "read": {}, "values": {}}
    (line,) = differences(here, **{**nothing, **changed})
    assert words in line


def test_messages_travel_in_pieces_and_keep_what_we_set():
    inside.TaskIdentity.run_id, inside.TaskIdentity.node_id, inside.TaskIdentity.task_id = 1, 1, 1
    order = inside.named(Message(content({"round": 3}, {0: b"abc"}), 7, "train.work", ttl=60.0), "order")
    reply = inside.answering(Message(content({"failed": []}, {0: b"xyz"}), reply_to=order), order, 7)
    with inside.no_object_id_recompute():
        head, tree, pieces = inside.packed(reply)
    assert head.metadata.reply_to_message_id == "order"
    assert (head.metadata.src_node_id, head.metadata.ttl, head.metadata.created_at) == (7, 60.0, order.metadata.created_at)
    assert head.metadata.message_id == reply.object_id
    assert {node.object_id for node in inside.iterate_object_tree(tree)} == set(pieces)
    whole = inside.inflate_object_from_contents(head.metadata.message_id, {name: piece.deflate() for name, piece in pieces.items()})
    assert isinstance(whole, Message)
    assert opened(whole) == ({"failed": []}, {0: b"xyz"})


def test_another_flower_is_named_with_the_remedy(monkeypatch):
    assert untested() == ""
    monkeypatch.setattr(metadata, "version", lambda name: "1.99.0")
    assert untested() == f"Flower 1.99.0 is none of the versions tested, {' and '.join(flower.FLOWER)}: pip install 'flwr>=1.41,<1.43'"
    with pytest.warns(match="Flower 1.99.0 is none of the versions tested"):
        flower.prepare()


def test_the_versions_tested_are_the_same_everywhere():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"]
    assert next(line for line in extra if "flwr" in line) == re.findall(r"pip install '(flwr.*?)'", _words_of("1.99.0"))[0]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert tuple(workflow["jobs"]["flower"]["strategy"]["matrix"]["flower"]) == flower.FLOWER
    assert f"[Flower](https://flower.ai) {' and '.join(flower.FLOWER)}" in " ".join((ROOT / "docs" / "deployment.md").read_text().split())


def _words_of(version: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: version)
        return untested()
