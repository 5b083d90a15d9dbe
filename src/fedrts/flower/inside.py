"""Everything that we use of Flower's internals, outside its public packages `flwr.app`, `flwr.clientapp` and `flwr.serverapp`.

Nothing else imports it, or reaches for what has an underscore there. tests/flower/test_inside.py holds every name, signature,
field and path to what we count on, and says what changed in a version that differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from fedrts.errors import InputError
from fedrts.flower import untested

try:
    from flwr.app.message import remove_content_from_message
    from flwr.cli.build import build_fab_from_files
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, SUPERLINK_NODE_ID, ErrorCode
    from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto, run_from_proto
    from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, message_pb2, runtime_pb2
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.node_pb2 import Node, NodeInfo
    from flwr.supercore.constant import TaskType
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.date import now
    from flwr.supercore.fab import Fab
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_body,
        get_object_head_values_from_object_content,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_confirm_message_received_fn_protobuf,
        make_pull_object_fn_protobuf,
        make_push_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError,
        ObjectPushError,
        ObjectUnavailableError,
        inflate_object_from_contents,
        push_objects,
    )
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.primitives.asymmetric import (
        bytes_to_public_key,
        generate_key_pairs,
        public_key_to_bytes,
        sign_message,
        verify_signature,
    )
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as error:
    raise InputError(f"{untested() or 'this Flower is damaged'} ({error})") from error

__all__ = [
    "HEARTBEAT_DEFAULT_INTERVAL",
    "SUPERLINK_NODE_ID",
    "ControlHttpClient",
    "ErrorCode",
    "Fab",
    "FleetHttpClient",
    "HeartbeatSender",
    "HttpGrid",
    "Node",
    "NodeAuthHttpInterceptor",
    "NodeInfo",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectTree",
    "ObjectUnavailableError",
    "RuntimeHttpClient",
    "RuntimeVersionHttpInterceptor",
    "SuperExecAuthHttpInterceptor",
    "TaskIdentity",
    "TaskType",
    "build_fab_from_files",
    "bytes_to_public_key",
    "control_pb2",
    "fab_to_proto",
    "fleet_pb2",
    "generate_key_pairs",
    "get_all_nested_objects",
    "get_object_body",
    "get_object_head_values_from_object_content",
    "get_object_tree",
    "heartbeat_pb2",
    "inflate_object_from_contents",
    "iterate_object_tree",
    "make_confirm_message_received_fn_protobuf",
    "make_pull_object_fn_protobuf",
    "make_push_object_fn_protobuf",
    "make_task_heartbeat_fn_http",
    "message_from_proto",
    "message_pb2",
    "message_to_proto",
    "no_object_id_recompute",
    "now",
    "public_key_to_bytes",
    "push_objects",
    "remove_content_from_message",
    "run_from_proto",
    "runtime_pb2",
    "sign_message",
    "verify_signature",
]

FLEET = "/v1/fleet/"
"""The paths that nodes need begin so."""
REGISTER = f"{FLEET}register-node"
"""Where a node would register itself."""
KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER = b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"
"""In the head of a request: the node's key, and the time with its signature."""
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
"""The method that our signature gives us a run by."""
SERVER_OPTIONS = ("--isolation", "process", "--disable-runtime-dependency-installation")
"""Options of `flower-superlink`: it starts no apps and installs nothing."""


# -- messages ---------------------------------------------------------------------------------------------------------


def named(message: Message, name: str) -> Message:
    """Return the message with the name under which it travels."""
    message.metadata.__dict__["_message_id"] = name
    return message


def answering(reply: Message, message: Message, node: int) -> Message:
    """Return a node's reply, which lives as long as its order by the server's clock; by ours the rest may be below zero."""
    reply.metadata.__dict__ |= {"_created_at": message.metadata.created_at, "_ttl": message.metadata.ttl, "_src_node_id": node}
    return reply


def packed(message: Message) -> tuple[Any, ObjectTree, dict[str, Any]]:
    """Return a message's head, the tree of its pieces, and the pieces by name."""
    named(message, message.object_id)
    head = message_to_proto(remove_content_from_message(message) if message.has_content() else message)
    return head, get_object_tree(message), get_all_nested_objects(message)


# -- the server's end -------------------------------------------------------------------------------------------------


def grid(address: str, insecure: bool, certificate: bytes | None, token: str, lost_after: float) -> tuple[HttpGrid, RuntimeHttpClient]:
    """Return the grid of a run, which gives up on an unresponsive SuperLink, and its client."""
    made = HttpGrid(address, insecure, certificate, token=token)
    made._retry_invoker.max_time = lost_after
    return made, made._runtime_client


def take_the_place(task: runtime_pb2.PullTaskInputResponse) -> None:
    """Make this process do the task: messages are sent in its name."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, task.run.run_id, task.context.node_id


# -- the SuperLink, in its own process --------------------------------------------------------------------------------


def superlink() -> tuple[Any, Any, Any]:
    """Return the application for this process's arguments, its settings, and its state."""
    from flwr.superlink.main import create_app

    stock = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its package has a function of the same name
    config = stock._parse_superlink_lifespan_config()
    app = create_app(config, stock.SuperLinkLifespan)
    return app, config, app.state.linkstate_factory.state()


def let_nodes_return() -> None:
    """Let a killed node back in at once; otherwise Flower counts it as online for another minute and refuses it."""
    handlers: Any = importlib.import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    stock = handlers.activate_node

    def activate_node(request: Any, state: Any) -> Any:
        node = state.get_node_id_by_public_key(request.public_key)  # the request is signed with this key
        if node is not None:
            state.deactivate_node(node)
        return stock(request, state)

    handlers.activate_node = activate_node


def agree_on_signatures(clocks: float, whole: float, verified: Callable[[bytes, bytes, bytes], bool]) -> None:
    """Make Flower's signature check, after the body, use our allowed clock difference and accept what we `verified`.

    By itself it lets a node's clock be ahead by 5 seconds.
    """
    node_auth: Any = importlib.import_module("flwr.superlink.routers.fleet.node_auth")
    node_auth.SYSTEM_TIME_TOLERANCE, node_auth.TIMESTAMP_TOLERANCE = clocks, whole
    node_auth.bytes_to_public_key, node_auth.verify_signature = bytes, verified
