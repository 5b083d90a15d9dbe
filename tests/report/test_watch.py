"""The live page: in a real Chromium it follows a run that goes on; by requests it gives away nothing but itself."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fedrts
from browser import Browser
from fedrts.audit.log import FILE as AUDIT
from fedrts.audit.log import AuditLog
from fedrts.cli.app import app
from fedrts.errors import InputError
from fedrts.observe import Silent
from fedrts.runs.folder import RunFolder
from fedrts.server.rounds import Record
from fedrts.serving.http import Endpoint, serving
from fedrts.watch import now
from fedrts.watch.page import LivePage
from report.conftest import SMALL

FIGURE = "digits-mlp-accuracy-rounds"
MEMBER = {
    "samples": 200,
    "data": "fingerprint-of-data",
    "key": "0123456789abcdef",
    "name": "clinic-a",
    "since": "2026-01-01",
    "state": "here",
}


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """A run after six of its twelve rounds; what follows is in `rest`."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "fedrts-0.3-1", folder)
    lines = (folder / "history.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "rest").write_bytes(b"".join(lines[6:]))
    (folder / "history.jsonl").write_bytes(b"".join(lines[:6]))
    for name in ("model.safetensors", "masks.safetensors", "fairness.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.fixture
def shown(folder: Path) -> Iterator[Endpoint]:
    with serving(Endpoint("127.0.0.1", 0), LivePage(folder)) as at:
        yield at


def get(at: Endpoint, path: str, method: str = "GET") -> tuple[int, str]:
    with closing(http.client.HTTPConnection(at.host, at.port, timeout=20)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def until(browser: Browser, expression: str, seconds: float = 20.0) -> None:
    due = time.monotonic() + seconds
    while not browser.js(expression):
        assert time.monotonic() < due, expression
        time.sleep(0.1)


def go_on(folder: Path) -> None:
    """The other rounds, in one of which a client was rejected; who is there; and what went on record."""
    (folder / "roster.json").write_text(json.dumps({"3": MEMBER}), "utf-8")
    log = AuditLog(folder / AUDIT, "server")
    log("asked", round=1, clients={"3": [10, "ff"]})
    log("refused", words="10.0.0.9 with key beef: this key is not registered (403) <script>alert(1)</script>")
    log.close()
    lines = [json.loads(line) for line in (folder.parent / "rest").read_bytes().splitlines()]
    lines[-1]["rejected"] = [{"client": 3, "reason": "not finite </script><img src=x onerror=alert(2)>"}]
    with open(folder / "history.jsonl", "a", encoding="utf-8") as history:
        history.write("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_follows_a_run(browser: Browser, folder: Path, shown: Endpoint):
    browser.open(shown.url, 1600)
    assert "6 of 12 rounds are finished" in browser.js("document.querySelector('#now').innerText")
    marks = f"document.querySelectorAll('#{FIGURE} .chart .mark').length"
    before = browser.js(marks)
    assert before > 0
    browser.js(f"document.querySelector('#{FIGURE} details.data').open = true")
    browser.js("window.kept = document.body")
    go_on(folder)
    until(browser, "document.querySelector('#now').innerText.includes('12 of 12 rounds are finished')")
    assert browser.js("window.kept === document.body"), "it is the same page, renewed"
    assert browser.js(marks) > before
    assert browser.js(f"document.querySelector('#{FIGURE} details.data').open")
    tables = browser.js("Object.fromEntries(['people', 'missing', 'record'].map((id) => [id, document.getElementById(id).innerText]))")
    assert "clinic-a" in tables["people"]
    assert "not finite </script><img src=x onerror=alert(2)>" in tables["missing"], "as text, and nothing else"
    assert "this key is not registered" in tables["record"]
    assert browser.js("document.querySelectorAll('main img, main script').length") == 0
    assert browser.js("document.getElementById('digits-mlp-section-topology') !== null")
    assert browser.complaints() == []
    assert {address.partition("?")[0] for address in browser.requests()} <= {shown.url, f"{shown.url}stamp", "data:,"}


def test_a_hidden_curve_stays_hidden(browser: Browser, folder: Path, shown: Endpoint):
    browser.open(shown.url, 1600)
    browser.js(f"document.querySelector('#{FIGURE} .legend button').click()")
    go_on(folder)
    until(browser, "document.querySelector('#now').innerText.includes('12 of 12')")
    assert browser.js(f"document.querySelector('#{FIGURE} .legend button').getAttribute('aria-pressed')") == "false"


def test_the_page_says_so_when_nobody_serves_it_any_more(browser: Browser, folder: Path):
    with serving(Endpoint("127.0.0.1", 0), LivePage(folder), token="a-token-that-is-long") as at:
        browser.open(f"{at.url}?token=a-token-that-is-long", 360)
        until(browser, "document.getElementById('live').innerText.startsWith('live, as of')")
        assert browser.js("document.documentElement.scrollWidth") == 360
    until(browser, "document.getElementById('live').className.includes('lost')")


class Paced(Silent):
    """A run that goes on after every round when somebody has looked twice: once in its middle perhaps, once at its end."""

    def __init__(self) -> None:
        self.looks = threading.Semaphore(0)

    def played(self, record: Record) -> None:
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.looks.acquire(timeout=30)


def test_it_follows_a_real_run_to_its_end(tmp_path: Path):
    """Whatever it reads while the run writes is a page, and every round appears."""
    out, seen, pace = tmp_path / "run", set(), Paced()
    settings = {**SMALL, "rounds": 5, "method": "fedrts", "density": 0.3, "out": out, "observer": pace}
    playing = threading.Thread(target=lambda: fedrts.run(**settings))
    playing.start()
    while not (out / "experiment.toml").exists():
        time.sleep(0.01)
    with serving(Endpoint("127.0.0.1", 0), LivePage(out)) as at:
        while playing.is_alive():
            status, text = get(at, "/")
            pace.looks.release()
            assert status == 200, text
            assert ": left out: " not in text
            assert "is damaged" not in text
            seen.add(text.partition(" of 5 rounds are finished")[0][-1])
        status, text = get(at, "/")
    assert "Now: finished" in text
    assert seen >= set("12345")


def test_everybody_who_looks_gets_the_page_that_was_made_once(folder: Path, shown: Endpoint, monkeypatch: pytest.MonkeyPatch):
    made = []

    def counted(path: Path) -> Any:
        made.append(path)
        return now.live(path)

    monkeypatch.setattr("fedrts.watch.page.live", counted)
    found: list[tuple[int, str]] = []
    looking = [threading.Thread(target=lambda: found.append(get(shown, "/"))) for _ in range(30)]
    for thread in looking:
        thread.start()
    for thread in looking:
        thread.join()
    assert [status for status, _ in found] == [200] * 30
    assert len(made) == 1
    stamp = get(shown, "/stamp")
    assert get(shown, "/stamp") == stamp
    go_on(folder)
    assert get(shown, "/stamp") != stamp


@pytest.mark.parametrize(
    "path",
    ["/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/experiment.toml", "/audit.jsonl", "/stamp/", "/..%5c", "/%00"],
)
def test_no_file_can_be_asked_for(shown: Endpoint, path: str):
    assert get(shown, path) == (404, "there is one page, at /\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(shown: Endpoint, folder: Path, method: str):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert get(shown, "/", method)[0] == 405
    assert get(shown, "/")[0] == 200
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before, "to look changes nothing either"


def test_the_page_says_neither_what_the_data_is_nor_where_files_lie(shown: Endpoint, folder: Path):
    go_on(folder)
    text = get(shown, "/")[1]
    assert "fingerprint-of-data" not in text
    assert f'href="{folder}' not in text
    assert "connect-src 'self'" in text


def test_who_looks_does_not_keep_a_run_from_starting(folder: Path):
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            now.stamp(folder)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with RunFolder(folder).writing():
                pass
    finally:
        stop.set()
        looking.join()


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="is no run folder"):
        app(["watch", str(tmp_path)], standalone_mode=False)
    (tmp_path / "experiment.toml").touch()
    monkeypatch.setenv("FEDRTS_WATCH_TOKEN", "short")
    with pytest.raises(InputError, match="give 16 or more"):
        app(["watch", str(tmp_path)], standalone_mode=False)
