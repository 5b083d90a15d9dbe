"""The federation of docs/deployment.md, word for word, with real processes: two clinics with images of their own, and what goes wrong.

A stranger and a clinic too many are refused, one clinic is killed and comes back, the other hangs and is late, and the study ends.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
pytest.importorskip("PIL", reason="fedrts[images] is not installed")

from PIL import Image

from federating import Running, free_port, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a dozen processes that import torch, on a machine that may be busy

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text("utf-8")
ROUNDS = 14
"""In place of the page's fifty."""


def blocks() -> list[str]:
    """The page's code blocks from "Three machines" up to the next heading."""
    section = PAGE.partition("## Three machines")[2].partition("\n## ")[0]
    return re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)


def commands(word: str) -> list[list[str]]:
    """The commands of the page that begin with these words, less `fedrts`."""
    lines = [line.partition("  #")[0] for block in blocks() for line in block.splitlines()]
    found = [shlex.split(line)[1:] for line in lines if line.startswith(f"fedrts {word}")]
    assert found, f"the page has no `fedrts {word}`"
    return found


def images(folder: Path, seed: int, count: int = 100) -> Path:
    """A clinic's folder: two classes, one brighter than the other."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(("healthy", "ill")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 100, (40, 40, 3)) + 90 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


class Study:
    """The page's machines on this one: a folder each, one port for all."""

    def __init__(self, path: Path, start: Callable[..., Running]) -> None:
        self.start, self.port = start, free_port()
        self.places = {name: path / name for name in ("coordinator", "clinic-a", "clinic-b", "clinic-c", "stranger")}
        for place in self.places.values():
            place.mkdir()
        self.run = self.places["coordinator"] / "runs" / "study"

    def at(self, place: str, words: list[str]) -> Running:
        """A command of the page at one of the places, with this machine's address and folders."""
        here = {"fl.example.org:8443": f"127.0.0.1:{self.port}", "127.0.0.1:9092": f"127.0.0.1:{self.port}"}
        words = [here.get(word, word).replace("/site/data", str(self.places[place] / "images")) for word in words]
        return self.start(*words, cwd=self.places[place])

    def done(self, place: str, words: list[str]) -> str:
        running = self.at(place, words)
        assert running.ended(180) == 0, running.text
        return running.text

    def client(self, place: str, *more: str) -> Running:
        words = next(words for words in commands("client") if "--data" in words and "--allow" not in words)
        return self.at(place, [*(word.replace("clinic-a", place) for word in words), *more])

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "history.jsonl").read_text().splitlines()]


def test_the_federation_of_the_page(tmp_path: Path):
    with processes() as start:
        study = Study(tmp_path, start)
        coordinator = study.places["coordinator"]
        for words in commands("keys init"):
            study.done("coordinator", words)
        (issue,) = commands("keys issue")
        for number, name in enumerate(("clinic-a", "clinic-b", "clinic-c", "stranger")):
            study.done(name, [name if word == "clinic-a" else word for word in issue])
            images(study.places[name] / "images", number)
            (study.places[name] / "ca.pem").write_bytes((coordinator / "authority" / "ca.pem").read_bytes())
            (coordinator / f"{name}.pub").write_bytes((study.places[name] / f"{name}.pub").read_bytes())
        registrations = commands("keys register")
        for words in registrations:
            study.done("coordinator", words)
        study.done("coordinator", [word.replace("clinic-b", "clinic-c") for word in registrations[-1]])

        (text,) = (block for block in blocks() if block.startswith("# study.toml"))
        assert "rounds = 50" in text
        (coordinator / "study.toml").write_text(text.replace("rounds = 50", f"rounds = {ROUNDS}"))
        (words,) = commands("server")
        server = study.at("coordinator", words)
        server.until("waiting for nodes")

        stranger = study.client("stranger", "--accept", "any")
        assert stranger.ended(180) == 77
        assert "not registered" in stranger.text
        hasty = study.client("clinic-a")
        assert hasty.ended(180) == 77, "nobody has agreed to anything"
        looking = study.client("clinic-a", "--dry-run")
        assert looking.ended(180) == 0, looking.text
        found = re.search(r"--accept ([0-9a-f]{16})", looking.text)
        assert found is not None, looking.text
        assert found[0] in hasty.text
        assert "weights on the mask" in looking.text

        consent = ("--accept", found[1])
        clinics = {name: study.client(name, *consent) for name in ("clinic-a", "clinic-b")}
        for clinic in clinics.values():
            clinic.until("taking part in fedrts")
        one_too_many = study.client("clinic-c", *consent)
        clinics["clinic-b"].until("worked for client 1")
        assert one_too_many.ended(180) == 77
        assert "all 2 sites of the experiment are known" in one_too_many.text

        clinics["clinic-b"].kill()
        server.until("LOST")
        clinics["clinic-b"] = study.client("clinic-b", *consent)
        clinics["clinic-b"].until("worked for client 1")

        clinics["clinic-a"].kill(signal.SIGSTOP)
        server.until("client 0 (clinic-a)")  # loudly: it is late, or seems to be gone
        clinics["clinic-a"].kill(signal.SIGCONT)

        assert server.ended(400) == 0, server.text
        for clinic in clinics.values():
            assert clinic.ended(60) == 0, clinic.text
            assert "the study is finished" in clinic.text

    lines, summary = study.lines(), json.loads((study.run / "summary.json").read_text())
    assert [line["clients"] for line in lines] == [[0, 1]] * ROUNDS, "nobody trained on alone"
    samples = [entry["samples"] for entry in json.loads((study.run / "clients.json").read_text())]
    assert samples == [160, 160], "all that is not held out"
    told = summary["federated"]
    assert [(entry["client"], entry["samples"]) for entry in told["clients"]] == [(0, 40), (1, 40)]
    assert summary["accuracy"] == told["mean"]["accuracy"]
    assert summary["accuracy"] > 0.9
    assert summary["rejected_replies"] == 0
