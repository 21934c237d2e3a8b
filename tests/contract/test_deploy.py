"""The container and the manifest: linted, valid, without privileges, and in step with the server that they start."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
DOCKERFILE, MANIFEST = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "kubernetes.yaml"
DRAIN_S = (
    25  # the longest graceful stop of the server; `test_grace_period_covers_the_servers_drain` holds it to the code
)


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile with its words, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(name, words) for name, _, words in (line.partition(" ") for line in joined)]


def of_the_server(name: str) -> list[str]:
    """The words of these instructions in the last stage, which becomes the image."""
    found = instructions()
    last = max(i for i, (each, _) in enumerate(found) if each == "FROM")
    return [words for each, words in found[last:] if each == name]


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture(scope="module")
def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def server(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def program(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    found = str(path) if path.exists() else shutil.which(name)
    return found or pytest.skip(f"{name} is not installed")


# --- linters ----------------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([program("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_manifest_is_valid_kubernetes() -> None:
    command = [program("kubernetes-validate"), "--strict", str(MANIFEST)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == 3


# --- the image --------------------------------------------------------------------------------------------------------


def test_base_image_is_pinned_and_what_builds_does_not_run() -> None:
    stages = [words for name, words in instructions() if name == "FROM"]
    assert stages == ["python:${PYTHON_TAG} AS build", "python:${PYTHON_TAG} AS server"]
    (tag,) = (words for name, words in instructions() if name == "ARG" and words.startswith("PYTHON_TAG="))
    assert re.fullmatch(r"PYTHON_TAG=3\.\d+(\.\d+)?-slim-\w+", tag)
    assert not of_the_server("RUN") and of_the_server("COPY") == ["--from=build /opt/venv /opt/venv"]


def test_image_runs_as_a_numbered_user_and_stops_by_the_signal_that_drains() -> None:
    (user,) = of_the_server("USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user), "Kubernetes can only tell by a number that it is not root"
    assert of_the_server("STOPSIGNAL") == ["SIGTERM"]


def test_image_writes_to_tmp_alone_and_downloads_nothing() -> None:
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(of_the_server("ENV"))))
    assert variables["HOME"] == "/tmp" and variables["VITLAB_CACHE"].startswith("/tmp/")
    assert variables["PYTHONDONTWRITEBYTECODE"] == variables["VITLAB_OFFLINE"] == "1"


def test_every_pip_call_is_held_to_the_constraints() -> None:
    calls = [words for name, words in instructions() if name == "RUN" and "pip install" in words]
    assert len(calls) == 2 and all("--constraint constraints.txt" in words for words in calls)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(.*?)\]", calls[-1])[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_health_check_is_a_program_that_fails_where_nothing_answers() -> None:
    (check,) = of_the_server("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "python" and "/healthz" in command[2]
    closed = command[2].replace(":8000", ":9")  # the port of the discard service, where nothing listens
    done = subprocess.run([sys.executable, "-c", closed], capture_output=True, check=False, timeout=60)
    assert done.returncode == 1


def test_image_is_built_from_the_source_alone() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    kept = {line[1:] for line in rules if line[0] == "!"}
    copied = {
        word
        for name, words in instructions()
        if name == "COPY" and "--from" not in words
        for word in words.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_pod_has_no_privileges(pod: dict[str, Any], server: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    context = pod["securityContext"]
    (user,) = of_the_server("USER")
    assert context["runAsNonRoot"] is True
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    own = server["securityContext"]
    assert own["readOnlyRootFilesystem"] is True and own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_only_tmp_can_be_written(pod: dict[str, Any], server: dict[str, Any]) -> None:
    writable = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "sizeLimit" in volumes["tmp"]["emptyDir"]
    assert {mount["name"] for mount in server["volumeMounts"]} == set(volumes)


def test_probes_ask_the_right_question(server: dict[str, Any]) -> None:
    paths = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 120, "time to load a large model"
    (port,) = server["ports"]
    assert f"--port={port['containerPort']}" in server["args"] and port["name"] == "http"


def test_memory_and_cpu_are_limited(server: dict[str, Any]) -> None:
    for kind in ("requests", "limits"):
        assert set(server["resources"][kind]) == {"cpu", "memory"}


def test_stop_waits_for_the_load_balancer_and_the_drain(pod: dict[str, Any], server: dict[str, Any]) -> None:
    pause = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = server["readinessProbe"]
    assert pause >= readiness["periodSeconds"] * readiness["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] >= pause + DRAIN_S + 5


def test_grace_period_covers_the_servers_drain() -> None:
    settings = pytest.importorskip("vitlab.serving.settings", reason="the server is not part of this version")
    assert settings.Limits().drain + settings.Limits().grace <= DRAIN_S


def test_token_comes_from_a_secret_and_none_is_in_the_files(pod: dict[str, Any], server: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (mount,) = (mount for mount in server["volumeMounts"] if "secret" in volumes[mount["name"]])
    (given,) = (word.partition("=")[2] for word in server["args"] if word.startswith("--token-file="))
    assert Path(given).parent == Path(mount["mountPath"])
    assert "env" not in server and not re.search(r"(?i)(password|token|secret|key)\s*=\s*\S", DOCKERFILE.read_text())


def test_service_and_budget_select_the_pods(manifest: dict[str, Any], server: dict[str, Any]) -> None:
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["Service"]["spec"]["selector"] == labels
    assert manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]
    assert f"--allow-host={manifest['Service']['metadata']['name']}" in server["args"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_both_start_a_command_that_the_server_has(server: dict[str, Any]) -> None:
    from vitlab.cli.main import app

    (entry,), (usual,) = of_the_server("ENTRYPOINT"), of_the_server("CMD")
    vitlab, verb = json.loads(entry)
    assert (vitlab, verb) == ("vitlab", "serve")
    command: Any = typer.main.get_command(app)
    if verb not in command.commands:
        pytest.skip("the server is not part of this version")
    for words in (json.loads(usual), server["args"]):
        with command.commands[verb].make_context(verb, list(words)) as context:  # an error for what it does not know
            models, host, port = (context.params[name] for name in ("models", "host", "port"))
        assert (list(models), host, port) == (["/model"], "0.0.0.0", 8000), shlex.join(words)
