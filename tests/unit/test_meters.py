"""Metrics: what events make of them, who can read them, and that the dashboard and the alerts name only what there is."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("prometheus_client", reason="fedrts[metrics] is not installed")

from prometheus_client.parser import text_string_to_metric_families

import fedrts
from fedrts.audit.log import CONFIGURED
from fedrts.errors import InputError
from fedrts.meters.board import Board
from fedrts.meters.names import METERS
from fedrts.observe.told import Told
from fedrts.serving import http as serving_http
from fedrts.serving.http import Answer, Endpoint, serving

ROOT = Path(__file__).parents[2]
PROMETHEUS_OWN = {"up", "time", "absent", "increase", "rate", "sum", "by", "and", "ignoring", "group_left", "label_values"}


def values(board: Board) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    families = text_string_to_metric_families(board.text.decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def played(board: Board, **facts: Any) -> None:
    base = {"round": 4, "clients": [0, 1], "rejected": [], "density": 0.25, "links_changed": 0.1, "seconds": 2.0, "metrics": {"loss": 0.5}}
    board("round", **{**base, "upload_bytes": 100, "download_bytes": 300, **facts})


def test_rounds_are_counted():
    board = Board("server")
    board(CONFIGURED, settings={"rounds": 9, "clients.total": 5})
    board("started", round=3, density=0.5, parameters=7, bytes=0)
    assert values(board)["fedrts_rounds_done",] == 3
    played(board)
    late = [(2, "late"), (3, "not reachable"), (4, "norm 3.25e+07 of the update, above 12"), (4, "norm 99 of the update, above 12")]
    played(board, round=5, rejected=[{"client": client, "reason": reason} for client, reason in late], epsilon=3.5)
    found = values(board)
    wanted = {
        ("fedrts_rounds_planned",): 9,
        ("fedrts_rounds_done",): 6,
        ("fedrts_rounds_total",): 2,
        ("fedrts_round_seconds_total",): 4,
        ("fedrts_upload_bytes_total",): 200,
        ("fedrts_download_bytes_total",): 600,
        ("fedrts_density",): 0.25,
        ("fedrts_metric", "loss"): 0.5,
        ("fedrts_clients_expected",): 5,
        ("fedrts_clients_asked_total",): 2 + 5,
        ("fedrts_clients_answered_total",): 4,
        ("fedrts_clients_late_total",): 1,
        ("fedrts_clients_missing_total", "not reachable"): 1,
        ("fedrts_clients_rejected_total", "norm # of the update, above #"): 2,
        ("fedrts_epsilon_spent",): 3.5,
        ("fedrts_events_total", "started"): 1,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert time.time() - 60 < found["fedrts_last_round_timestamp_seconds",] <= time.time()
    assert found["process_resident_memory_bytes",] > 1e6


def test_a_node_counts_its_work():
    board = Board("node")
    assert ("fedrts_epsilon_spent",) not in values(board), "0 would say that nothing was given away"
    board.limited(8.0)
    board("connected", server="here")
    assert values(board)["fedrts_ready",] == 1
    board("asked", round=2, exchange=0, clients={"0": [500, "aa"], "1": [300, "bb"]})
    board("sent", round=2, exchange=0, clients={"0": [50, "cc"]}, failed=[1], seconds=1.5, epsilon={"0": 2.0})
    board("sent", round=3, exchange=0, clients={"0": [50, "cc"]}, failed=[], seconds=0.5, epsilon={"0": None})
    found = values(board)
    names = ("download_bytes_total", "upload_bytes_total", "work_seconds_total", "rounds_done", "epsilon_spent", "epsilon_limit")
    assert [found[f"fedrts_{name}",] for name in names] == [800, 100, 2.0, 4, math.inf, 8]
    assert (found["fedrts_orders_total", "answered"], found["fedrts_orders_total", "failed"]) == (2, 1)
    board("disconnected", server="here")
    assert values(board)["fedrts_ready",] == 0


def test_no_words_of_a_client_fill_the_memory():
    board = Board("server")
    for number in range(500):
        words = "".join(chr(97 + int(digit)) for digit in str(number))
        played(board, rejected=[{"client": 0, "reason": f'{words}{"x" * 10_000}\n{{}}"'}])
        played(board, rejected=[{"client": 0, "reason": f"its node says: {words}"}])
    found = {name: value for name, value in values(board).items() if name[0] == "fedrts_clients_rejected_total"}
    assert len(found) <= 51
    assert all(len(name[1]) <= 80 for name in found)
    assert found["fedrts_clients_rejected_total", "its node says"] == 500
    assert sum(found.values()) == 1000


def test_a_run_is_measured_by_phase(tmp_path: Path):
    board = Board("run")
    with board.shown(Endpoint("127.0.0.1", 0)) as at:
        assert get(at, "/readyz")[0] == 503
        small: dict[str, Any] = {
            "data": "toy_images",
            "model_options": {"hidden": [8]},
            "clients": {"total": 4, "per_round": 2, "min_size": 1},
        }
        fedrts.run(**small, rounds=3, epochs=1, density=0.5, batch_size=8, engine="serial", out=tmp_path / "run", observer=Told(board))
        assert [get(at, path)[0] for path in ("/metrics", "/healthz", "/readyz", "/")] == [200, 200, 503, 404]
    found = values(board)
    assert found["fedrts_rounds_done",] == found["fedrts_rounds_planned",] == found["fedrts_rounds_total",] == 3
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert found["fedrts_upload_bytes_total",] == sum(line["upload_bytes"] for line in history)
    phases = {name[1]: value for name, value in found.items() if name[0] == "fedrts_phase_seconds_total"}
    assert set(phases) == {"clients", "guard", "sums", "update", "evaluation", "writing"}
    assert 0 < sum(phases.values()) <= sum(line["seconds"] for line in history) + phases["writing"] + 0.1


def named(expression: str) -> set[str]:
    """The metrics that an expression of Prometheus names."""
    plain = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|(by|ignoring) ?\([^)]*\)', " ", expression)
    return set(re.findall(r"[a-z_]{2,}", plain)) - PROMETHEUS_OWN - {"instance"}


def exported() -> set[str]:
    process = {name[0] for name in values(Board("server")) if name[0].startswith("process_")}
    return {meter.name + "_total" * meter.counts for meter in METERS} | process


def expressions() -> list[str]:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text("utf-8"))
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    drawn = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*alerts, *drawn, *(entry["query"]["query"] for entry in board["templating"]["list"] if entry["type"] == "query")]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_and_the_alerts_name_metrics_that_exist(expression: str):
    assert named(expression)
    assert named(expression) <= exported()


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    shown = set().union(*(named(expression) for expression in expressions()))
    assert {name for name in exported() if name.startswith("fedrts_")} - shown <= {
        "fedrts_started_timestamp_seconds",
        "fedrts_round_seconds_total",
    }


def test_labels_in_expressions_are_those_of_their_metrics():
    labels = {meter.name + "_total" * meter.counts: {*meter.labels, "instance"} for meter in METERS}
    for expression in expressions():
        for name, inside in re.findall(r"([a-z_]+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*[=!]", inside)) <= labels.get(name, {"instance"}), expression


def test_alerts_say_what_to_do():
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text("utf-8"))
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 10
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("info", "warning", "critical")


# -- the web server ---------------------------------------------------------------------------------------------------


def get(at: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(at.host, at.port, timeout=10)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def raw(at: Endpoint, data: bytes, seconds: float = 10.0) -> bytes:
    with socket.create_connection((at.host, at.port), timeout=seconds) as connection:
        found = b""
        try:
            connection.sendall(data)
            while part := connection.recv(2**16):
                found += part
        except ConnectionError:
            pass
        return found


@pytest.fixture
def here():
    with serving(Endpoint("127.0.0.1", 0), lambda request: Answer(200, request.path.encode())) as at:
        yield at


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_nothing_but_reading(here: Endpoint, method: str):
    assert get(here, "/x", method)[0] == 405


def test_a_head_has_no_body(here: Endpoint):
    assert get(here, "/x") == (200, b"/x")
    assert raw(here, b"HEAD /x HTTP/1.1\r\nHost: localhost\r\n\r\n").endswith(b"\r\n\r\n")


def test_a_huge_request_is_not_read(here: Endpoint):
    assert raw(here, b"GET /" + b"x" * 2**14).startswith(b"HTTP/1.1 431")
    assert b" 200 " not in raw(here, b"GET /" + b"x" * 2**22)
    body = b"GET /y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 2**16
    raw(here, body)
    assert get(here, "/y") == (200, b"/y")


@pytest.mark.parametrize(
    "head", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request_is_said_to_be_none(here: Endpoint, head: bytes):
    assert raw(here, head).startswith(b"HTTP/1.1 400")


def test_who_has_no_token_sees_nothing():
    with serving(Endpoint("127.0.0.1", 0), lambda request: Answer(200, b"secret"), token="right") as at:
        assert [get(at, path)[0] for path in ("/", "/?token=", "/?token=wrong", "/?token=right&token=wrong")] == [403] * 4
        assert get(at, "/", Authorization="Bearer wrong")[0] == 403
        assert get(at, "/?token=right") == get(at, "/", Authorization="Bearer right") == (200, b"secret")


def test_a_page_of_somebody_else_cannot_read_what_is_for_this_machine(here: Endpoint):
    assert [get(here, "/", Host=name)[0] for name in ("evil.example", "evil.example:80", "", "[::2]", "127.0.0.1.evil")] == [403] * 5
    assert [get(here, "/", Host=name)[0] for name in ("localhost", "localhost:99", "127.0.0.1:5", "[::1]:5")] == [200] * 4


def test_many_connections_that_say_nothing_go_away(here: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_http, "SECONDS", 1.0)
    idle = [socket.create_connection((here.host, here.port)) for _ in range(300)]
    began = time.monotonic()
    while True:
        try:
            assert get(here, "/y") == (200, b"/y")
            break
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() - began < 8, "they keep others out"
            time.sleep(0.1)
    for connection in idle:
        connection.close()


def test_a_slow_answer_holds_nobody_up():
    gate = threading.Event()

    def answer(path: str) -> Answer:
        assert path != "/slow" or gate.wait(20)
        return Answer(200)

    with serving(Endpoint("127.0.0.1", 0), lambda request: answer(request.path)) as at:
        waiting = threading.Thread(target=get, args=(at, "/slow"))
        waiting.start()
        assert get(at, "/quick")[0] == 200
        gate.set()
        waiting.join(10)
    assert get_nothing(at)


def get_nothing(at: Endpoint) -> bool:
    """Is nobody there any more?"""
    try:
        get(at, "/")
    except OSError:
        return True
    return False


def test_an_error_tells_its_kind_alone():
    with serving(Endpoint("127.0.0.1", 0), lambda request: Answer(1 // 0)) as at:
        assert get(at, "/") == (500, b"this could not be answered: ZeroDivisionError\n")


@pytest.mark.parametrize("text", ["", "x", "127.0.0.1", "127.0.0.1:x", "1:99999", "a b:80", "http://x:80/"])
def test_what_is_no_address_is_refused(text: str):
    with pytest.raises(InputError, match="give a port such as 9464"):
        Endpoint.of(text, "--metrics")


def test_addresses():
    assert Endpoint.of("9464", "--metrics") == Endpoint("127.0.0.1", 9464)
    assert [Endpoint.of(text, "-").is_local for text in ("9464", "localhost:1", "[::1]:1", "0.0.0.0:1", "example.org:1")] == [True] * 3 + [
        False
    ] * 2
    nothing = contextlib.ExitStack()
    with serving(Endpoint("127.0.0.1", 0), lambda request: Answer(200)) as at, pytest.raises(InputError, match="cannot listen at 127"):
        nothing.enter_context(serving(at, lambda request: Answer(200)))
