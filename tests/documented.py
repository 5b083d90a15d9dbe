"""The commands of docs/deployment.md, and which test runs each of them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "deployment.md").read_text("utf-8")

WORD_FOR_WORD = "tests/attack/test_documented_federation.py::test_the_federation_of_the_page"
"""Runs commands as they stand on the page; that it has run these, and no others, is its last assertion."""

COMPOSE = "tests/flower/test_deployed_processes.py::test_docker_compose_up"
"""Runs what the containers run, without containers."""

LOGS = "tests/flower/test_federation_logs.py::test_every_line_of_a_federation_is_json"

TESTED = {
    "fedrts run --engine flower --set engine.nodes=3": WORD_FOR_WORD,
    "fedrts keys init authority --host fl.example.org": WORD_FOR_WORD,
    "fedrts keys issue clinic-a": WORD_FOR_WORD,
    "fedrts keys register clinic-a.pub --dir authority": WORD_FOR_WORD,
    "fedrts keys register clinic-b.pub --dir authority": WORD_FOR_WORD,
    "fedrts keys register clinic-c.pub --dir authority": WORD_FOR_WORD,
    "fedrts server study.toml --address 127.0.0.1:9092 --tls authority": WORD_FOR_WORD,
    "fedrts client --server fl.example.org:8443 --data folder:/site/data --set size=32 --set test=0.2 --key clinic-a.key --ca ca.pem": (
        WORD_FOR_WORD
    ),
    "fedrts client --server fl.example.org:8443 --data folder:/site/data --set size=32 --set test=0.2 "
    "--allow my_package.nets:net --key clinic-a.key --ca ca.pem": WORD_FOR_WORD,
    "fedrts client --server fl.example.org:8443 --data folder:/site/data --set size=32 --set test=0.2 --key clinic-a.key --ca ca.pem "
    "--accept 1f0c6a92b3d47e58": WORD_FOR_WORD,
    "fedrts roster runs/study": WORD_FOR_WORD,
    "fedrts roster runs/study remove 0": WORD_FOR_WORD,
    "fedrts roster runs/study readmit 0": WORD_FOR_WORD,
    'fedrts roster runs/study rename 1 "Clinic B"': WORD_FOR_WORD,
    "fedrts client --server fl.example.org:8443 --key clinic-a.key --ca ca.pem --withdraw": WORD_FOR_WORD,
    "fedrts keys revoke clinic-a --dir authority": WORD_FOR_WORD,
    "fedrts watch runs/study": WORD_FOR_WORD,
    "FEDRTS_WATCH_TOKEN=$(cat watch.token) fedrts watch runs/study --address 10.0.0.5:9465": WORD_FOR_WORD,
    "fedrts server study.toml --address 127.0.0.1:9092 --tls authority --metrics 9464": WORD_FOR_WORD,
    "fedrts client --server fl.example.org:8443 --data folder:/site/data --set size=32 --set test=0.2 --key clinic-a.key --ca ca.pem "
    "--metrics 9464": WORD_FOR_WORD,
    "fedrts server study.toml --address 127.0.0.1:9092 --tls authority --log-format json": LOGS,
    "fedrts client --server fl.example.org:8443 --data folder:/site/data --set size=32 --set test=0.2 --key clinic-a.key --ca ca.pem "
    "--log-format json --log-level warning": LOGS,
    "fedrts audit verify runs/study/audit.jsonl --key authority/server.pem": WORD_FOR_WORD,
    "fedrts audit verify clinic-a.site/audit.jsonl --key clinic-a.pub": WORD_FOR_WORD,
    "fedrts audit compare clinic-a.site/audit.jsonl runs/study/audit.jsonl --key clinic-a.pub --key authority/server.pem": WORD_FOR_WORD,
    "fedrts audit verify runs/study/audit.jsonl --key authority/server.pem --head last-year.head": WORD_FOR_WORD,
    "fedrts cost --model resnet18 --method fedrts --density 0.1": WORD_FOR_WORD,
    "fedrts keys init authority --renew --host fl.example.org": WORD_FOR_WORD,
    "fedrts keys rotate clinic-a.key": "tests/flower/test_rotation.py::test_keys_by_their_commands",
    "fedrts keys replace clinic-a clinic-a.next.pub --dir authority": "tests/flower/test_rotation.py::test_keys_by_their_commands",
    "mkdir -p backup/study": "tests/unit/test_backup.py::test_a_backup_of_a_running_study_goes_on_elsewhere",
    "cp -a runs/study/checkpoint backup/study/": "tests/unit/test_backup.py::test_a_backup_of_a_running_study_goes_on_elsewhere",
    "cp -a runs/study/*.* backup/study/": "tests/unit/test_backup.py::test_a_backup_of_a_running_study_goes_on_elsewhere",
    "fedrts client … --partition 0,3": "tests/flower/test_deployment.py::test_it_equals_the_serial_engine_bit_for_bit",
    "fedrts keys register clinic-a.pub --dir authority --clients 0,3": WORD_FOR_WORD,
    'flower-supernode … --node-config \'data="npz:/site/data.npz" accept="1f0c6a92b3d47e58" state="/site/fedrts.site"\'': (
        "tests/flower/test_faults.py::test_flowers_own_supernode_can_stand_for_clients"
    ),
    "docker compose run --rm keys": COMPOSE,
    "docker compose up --detach": COMPOSE,
    "docker compose up --detach server": COMPOSE,
    "docker compose up --detach site-a": COMPOSE,
    "systemctl enable --now fedrts-site": "tests/flower/test_deployed_processes.py::test_systemd_units",
}
"""Every command of the page that a test runs, with the test. `WORD_FOR_WORD` takes it from the page; other tests run one like it."""

NOT_RUN = {
    'pip install "fedrts[flower]"': "it installs from a package index, which tests do without",
    'pip install "fedrts[metrics]"': "as above",
    'pip install "fedrts[flower,images,metrics]"': "as above",
    "cd deploy": "it runs nothing",
    "docker compose build": "it needs a Docker daemon: the workflow's job `deploy` runs it",
    "docker compose logs --follow": "as above",
    "docker compose down": "as above",
    "docker compose up --detach --force-recreate server": "as above",
    "python3 -m venv /opt/fedrts": "it changes the machine",
    "useradd --system --home-dir /var/lib/fedrts --shell /usr/sbin/nologin fedrts": "as above",
    "cp deploy/systemd/fedrts-site.service /etc/systemd/system/": "as above",
}
"""The other commands, and why no test runs them."""

_PROGRAMS = ("fedrts", "pip", "flower-supernode", "docker", "podman", "kubectl", "systemctl", "journalctl", "apt", "cp", "tar", "nginx")
"""Spans of text that begin with one of these, and say more than which command is meant, are commands too."""
_MENTION = r"[\w-]+|fedrts( [a-z]+){1,2}( …)?"
_SHELL = ("", "bash", "console", "sh", "shell")
"""Languages of blocks whose lines are commands; blocks of other languages are files."""


def blocks(text: str = PAGE) -> list[tuple[str, str]]:
    """The page's code blocks, each with its language."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


def commands(text: str = PAGE) -> list[str]:
    """All commands of the page without their remarks: lines of blocks, what units start, and spans of text."""
    found = []
    for language, block in blocks(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language in _SHELL:
            found += [line for line in lines if line.strip() and not line.startswith("#")]
        else:
            found += [line.partition("=")[2] for line in lines if re.match(r"Exec\w+=", line)]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    found += [span for span in spans if span.split()[0] in _PROGRAMS and not re.fullmatch(_MENTION, span)]
    return list(dict.fromkeys(" ".join(plain(line).split()) for line in found))


def plain(line: str) -> str:
    """A command without its prompt, its remark, and the folder of its program."""
    return re.sub(r"^\S*/bin/", "", re.sub(r"^\$ ", "", line.partition("  #")[0].strip()))
