"""The programs that deploy/ starts, read out of its files, and played as plain processes: a folder in place of each container's root."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CREDENTIALS = "/run/credentials"
"""Where a unit finds its LoadCredential here."""


@dataclass(frozen=True)
class Part:
    """One program of a file."""

    name: str
    words: list[str]
    """Its command, less `fedrts`."""
    mounts: dict[str, str] = field(default_factory=dict)
    """What lies at a path inside: the name that the file has for it."""

    def at(self, root: Path, replaced: Mapping[str, str]) -> list[str]:
        """The command for a process whose root is `root`, with other words for some, such as addresses."""
        words = [re.sub(r"(^|[=:])/(?=(etc|run|srv|var|data)\b)", rf"\g<1>{root}/", word) for word in self.words]
        for old, new in replaced.items():
            words = [re.sub(rf"(^|=){re.escape(old)}$", rf"\g<1>{new}", word) for word in words]
        return words

    def furnish(self, root: Path, sources: Mapping[str, Path]) -> None:
        """Make that root, out of the sources by their names in the file."""
        for path, source in self.mounts.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(sources[source].resolve(strict=True))


def compose() -> dict[str, Any]:
    """The file as Compose reads it where no variable is set."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text("utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def mount(volume: str | dict[str, Any]) -> dict[str, Any]:
    """A volume of a service in the long form."""
    if isinstance(volume, dict):
        return volume
    source, target, *options = volume.split(":")
    return {"source": source, "target": target, "read_only": options == ["ro"]}


def services() -> dict[str, Part]:
    """The services of compose.yaml that `docker compose up` starts."""
    found = {}
    for name, service in compose()["services"].items():
        if "profiles" in service:
            continue
        mounts = {volume["target"]: volume["source"] for volume in map(mount, service["volumes"])}
        for secret in service["secrets"]:
            long = secret if isinstance(secret, dict) else {"source": secret, "target": f"/run/secrets/{secret}"}
            mounts[long["target"]] = long["source"]
        found[name] = Part(name, shlex.split(service["command"]), mounts)
    return found


def unit(path: Path) -> dict[str, list[str]]:
    """The settings of a unit: all values of each."""
    text = re.sub(r"^[#;].*\n", "", path.read_text("utf-8"), flags=re.M).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    return found


def unit_part(path: Path) -> Part:
    """A unit's program. What it does not mount it finds on its machine: there the mounts are the paths of its command."""
    settings = unit(path)
    (command,) = settings["ExecStart"]
    program, *words = shlex.split(command.replace("${CREDENTIALS_DIRECTORY}", CREDENTIALS))
    assert program == "/opt/fedrts/bin/fedrts"
    loaded = dict(entry.split(":") for entry in settings.get("LoadCredential", []))
    return Part(path.stem, words, {f"{CREDENTIALS}/{name}": source for name, source in loaded.items()})


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def pod(path: Path) -> dict[str, Any]:
    """What the Job of a manifest starts."""
    (job,) = (document for document in documents(path) if document["kind"] == "Job")
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def pod_part(path: Path) -> Part:
    """The program of a manifest; its mounts by the names of secrets, config maps and claims, with `/KEY` for single files."""
    (container,) = pod(path)["containers"]
    volumes = {volume["name"]: volume for volume in pod(path)["volumes"]}
    mounts = {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        source = volume.get("secret", {}).get("secretName") or volume.get("configMap", {}).get("name")
        source = source or volume.get("persistentVolumeClaim", {}).get("claimName") or mount["name"]
        mounts[mount["mountPath"]] = f"{source}/{mount['subPath']}" if "subPath" in mount else source
    return Part(path.stem, container["args"], mounts)


def health_check() -> list[str]:
    """The command of the image's HEALTHCHECK, less `python`."""
    found = re.search(r"^HEALTHCHECK(?:.*\\\n)*\s*CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.M)
    assert found is not None
    program, *words = yaml.safe_load(found[1])
    assert program == "python"
    return list(words)


def path_with(program: Path) -> str:
    """The PATH on which this program comes first."""
    return f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"
