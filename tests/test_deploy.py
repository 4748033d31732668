"""The files of deploy/: what they name exists, and the service runs with exactly their arguments.

The tests have no container engine, no running systemd and no cluster. So they read the command
lines out of the files, give them to the real parser of the settings, and start the service with
them: on loopback, with free ports, one worker, and temporary folders in place of /etc and /var. All
other arguments stay. Each file says at its top how far it was tested.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # ships no types
import pytest
import yaml
from typer.testing import CliRunner

from ratekeeper.cli.main import app
from ratekeeper.service.process import startup
from ratekeeper.service.process.settings import ServiceSettings
from tests.conformance.stores import PATIENT
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.single import Single
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import ServiceProcess
from tests.test_packages import SOURCES

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
# The oldest version that has every field, and the newest of the package.
SCHEMAS = ("1.29", kubernetes_validate.latest_version())
EXPOSURE_MAX = 2.0
GOSSIP_SECONDS_MAX = 60.0
SELECTOR = {"app.kubernetes.io/name": "ratekeeper"}


class DeployedService(ServiceProcess):
    """A service with the command line of a file in deploy/, on ports and in folders of its own."""

    def __init__(self, arguments: Sequence[str] = (), data: Path | None = None, **env: str) -> None:
        workers = {"RATEKEEPER_WORKERS": "1"}
        super().__init__(None, env={**workers, **env})
        self.data = data or self.data
        self.arguments = arguments

    def command(self) -> list[str]:
        """Return the command line of the file."""
        return [sys.executable, "-m", "ratekeeper", *self.arguments]


def settings_of(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], env: Mapping[str, str] | None = None
) -> ServiceSettings:
    """Return the settings that `ratekeeper` starts the service with; fail if it rejects them."""
    found: list[ServiceSettings] = []
    monkeypatch.setattr(startup, "run", found.append)
    result = CliRunner().invoke(app, arguments, env=env)
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(
    "path",
    [
        DEPLOY / "Dockerfile",
        *sorted(DEPLOY.glob("ratekeeper.*")),
        *sorted(KUBERNETES.glob("*.yaml")),
    ],
    ids=lambda path: path.name,
)
def test_each_file_says_how_far_it_was_tested(path: Path) -> None:
    """In the comment at its top, where the reader who copies it sees it."""
    top = re.match(r"(?:#.*\n|\n)+", path.read_text(encoding="utf-8"))
    assert top is not None
    assert re.search(r"Tested", top[0])
    if path.name in {"Dockerfile", "ratekeeper.service", "kustomization.yaml"}:
        assert "Not tested:" in top[0]


# ── Docker ─────────────────────────────────────────────────────────────────────────────────────


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(each.split(maxsplit=1)[0], each.split(maxsplit=1)[1]) for each in joined.splitlines()]


def stage(number: int) -> list[tuple[str, str]]:
    """Return the instructions of one stage."""
    found = instructions()
    starts = [index for index, (name, _) in enumerate(found) if name == "FROM"]
    return found[starts[number] : [*starts, len(found)][number + 1]]


def value_of(name: str, number: int = 1) -> str:
    """Return the arguments of the only instruction of a name in a stage."""
    (found,) = [arguments for each, arguments in stage(number) if each == name]
    return found


def test_the_image_is_built_of_the_files_of_the_source_distribution() -> None:
    """`test_packages.py` builds and installs that one. Docker gets the same files and no others."""
    copied = [shlex.split(arguments) for name, arguments in stage(0) if name == "COPY"]
    sources = {source for *each, _ in copied for source in each}
    assert sources == {"src", *(name.split("/")[0] for name in SOURCES)}
    assert all((ROOT / source).exists() for source in sources)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == sources


def test_the_image_installs_extras_that_exist() -> None:
    """pip would only warn about an unknown extra. Both C extensions are required."""
    (pip,) = [arguments for name, arguments in stage(0) if "pip install" in arguments]
    extras = re.search(r"'\.\[([a-z,]+)\]'", pip)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert value_of("ENV", 0) == "RATEKEEPER_KERNEL=required RATEKEEPER_HTTP2=required"


def test_the_image_runs_as_an_ordinary_user() -> None:
    """The last stage is small, has no compiler, and USER is a number other than 0."""
    user, group = (int(each) for each in value_of("USER").split(":"))
    assert user
    assert group
    runs = " ".join(arguments for name, arguments in stage(1) if name == "RUN")
    assert f"--uid {user} " in runs
    assert f"--gid {group} " in runs
    assert "gcc" not in runs
    assert stage(0)[0][1].split()[0] == stage(1)[0][1].split()[0]
    names = [name for name, _ in stage(1)]
    assert names.index("USER") < names.index("VOLUME") < names.index("ENTRYPOINT")


@pytest.fixture
def image(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of the container, with temporary folders."""
    program, *entry = json.loads(value_of("ENTRYPOINT"))
    assert program == "ratekeeper"
    command = [*entry, *json.loads(value_of("CMD"))]
    variables = dict(each.split("=", 1) for each in shlex.split(value_of("ENV")))
    (volume,) = json.loads(value_of("VOLUME"))
    assert variables["RATEKEEPER_DATA"] == volume
    env = {name: value for name, value in variables.items() if name.startswith("RATEKEEPER_")}
    return command, {**env, "RATEKEEPER_DATA": str(tmp_path)}


def test_the_container_needs_a_token(image: tuple[list[str], dict[str, str]]) -> None:
    """It listens on all addresses. Without a token, the service says how to create one."""
    command, env = image
    result = CliRunner().invoke(app, command, env=env)
    assert result.exit_code == 2
    assert "ratekeeper token create" in result.stderr


def test_the_container_serves_and_stops(
    image: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    """Its command starts the service, its health check passes, and SIGTERM ends it with code 0."""
    command, env = image
    admin = secrets_of(tmp_path)["admin"]
    exposed = value_of("EXPOSE").split()
    assert exposed == ["8080/tcp", "8081/tcp", "7946/udp"]
    here = [each.replace("0.0.0.0", HOST).replace(":8081", ":0") for each in command]
    assert here != command
    # The variables that docs/deploy.md gives to `docker run`, and a free port.
    given = {"RATEKEEPER_SEED": str(ROOT / "examples/limits.yaml"), "RATEKEEPER_PORT": "0"}
    with DeployedService(here, tmp_path, **env, **given) as service:
        headers = {"Authorization": f"Bearer {admin}"}
        assert service.ask("GET", "/readyz").status == 200
        request = {"api_key": "sk_1", "endpoint": "/v1/search"}
        assert service.ask("POST", "/v1/check", request, headers).status == 200
        check = json.loads(value_of("HEALTHCHECK").partition("CMD")[2])
        port = service.url.rpartition(":")[2]
        _, *rest = (each.replace(":8080/", f":{port}/") for each in check)
        subprocess.run([sys.executable, *rest], check=True, timeout=60)
        assert service.end(signal.SIGTERM) == 0
        assert subprocess.run([sys.executable, *rest], check=False, capture_output=True).returncode


# ── systemd ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with a program that exists here: `verify` looks for it."""
    text = (DEPLOY / "ratekeeper.service").read_text(encoding="utf-8")
    program = Path(sys.executable).with_name("ratekeeper")
    path = tmp_path / "ratekeeper.service"
    path.write_text(text.replace("/opt/ratekeeper/bin/ratekeeper", str(program)))
    return path


def lines_of(name: str) -> list[str]:
    """Return the values of a setting of the unit, in their order."""
    text = (DEPLOY / "ratekeeper.service").read_text(encoding="utf-8")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def test_systemd_accepts_the_unit(unit: Path) -> None:
    """`systemd-analyze verify` finds no unknown setting, no wrong value, no missing program."""
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("ProtectSystem=", "ProtectSytem="))
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert "ProtectSytem" in done.stderr


def test_the_unit_is_confined(unit: Path) -> None:
    """`systemd-analyze security` rates its exposure from 0 to 10; most services have 9."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found = re.search(r"Overall exposure level for ratekeeper.service: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) <= EXPOSURE_MAX


def unit_arguments(folder: Path, data: Path) -> list[str]:
    """Return the arguments of ExecStart, with folders in place of /etc/ratekeeper and %S."""
    (start,) = lines_of("ExecStart")
    program, *arguments = shlex.split(start)
    assert program == "/opt/ratekeeper/bin/ratekeeper"
    assert lines_of("StateDirectory") == ["ratekeeper"]
    return [
        each.replace("/etc/ratekeeper", str(folder)).replace("%S/ratekeeper", str(data))
        for each in arguments
    ]


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """The folder that the unit has as /etc/ratekeeper, with the settings of deploy/."""
    folder = tmp_path / "etc"
    folder.mkdir()
    shutil.copy(DEPLOY / "ratekeeper.yaml", folder)
    shutil.copy(ROOT / "examples/limits.yaml", folder)
    return folder


def test_the_unit_stops_later_than_the_service_needs(
    monkeypatch: pytest.MonkeyPatch, etc: Path, tmp_path: Path
) -> None:
    """systemd kills after TimeoutStopSec. It allows as many files as the service wants."""
    settings = settings_of(monkeypatch, unit_arguments(etc, tmp_path))
    assert settings.data == str(tmp_path)
    assert settings.seed == "/etc/ratekeeper/limits.yaml"
    assert settings.is_local
    (stop,) = lines_of("TimeoutStopSec")
    assert int(stop) > settings.drain_seconds + settings.shutdown_seconds
    assert lines_of("LimitNOFILE") == [str(startup.OPEN_FILES)]


def test_the_unit_starts_the_service(etc: Path, tmp_path: Path) -> None:
    """With its command line and the settings of deploy/; the rules are those of the seed."""
    path = etc / "ratekeeper.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    changed = {"port": 0, "grpc": f"{HOST}:0", "seed": str(etc / "limits.yaml")}
    assert set(changed) <= set(settings)
    path.write_text(yaml.safe_dump(settings | changed))
    data = tmp_path / "data"
    with DeployedService(unit_arguments(etc, data), data) as service:
        ready = service.ask("GET", "/readyz")
        assert (ready.status, ready.data["rules"]["version"]) == (200, "1")
        request = {"api_key": "sk_1", "endpoint": "/v1/orders/7", "method": "POST"}
        assert service.ask("POST", "/v1/check", request).data["rule"] == "orders"


# ── Kubernetes ─────────────────────────────────────────────────────────────────────────────────


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the resources of all manifests with the names of their files."""
    others = {"kustomization.yaml", "limits.yaml"}
    for path in sorted(KUBERNETES.glob("*.yaml")):
        if path.name not in others:
            for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
                yield path.name, each


def resource(kind: str, name: str = "ratekeeper") -> dict[str, Any]:
    """Return one resource."""
    (found,) = [r for _, r in manifests() if (r["kind"], r["metadata"]["name"]) == (kind, name)]
    return found


def pod() -> dict[str, Any]:
    """Return the specification of the pods."""
    found: dict[str, Any] = resource("Deployment")["spec"]["template"]["spec"]
    return found


def kustomization() -> dict[str, Any]:
    """Return the list of the manifests, and of the files that become resources."""
    text = (KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("version", SCHEMAS)
def test_the_manifests_are_valid(version: str) -> None:
    """By the schemas of Kubernetes, in an old and a new version, without unknown fields."""
    kinds = []
    for _, each in manifests():
        kubernetes_validate.validate(each, version, strict=True)
        kinds.append(each["kind"])
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)
    unknown = resource("Deployment")
    unknown["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(unknown, version, strict=True)


def test_every_manifest_is_applied() -> None:
    """kustomize knows all files; only the autoscaler is left to the user."""
    listed = kustomization()
    (rules,) = listed["configMapGenerator"]
    named = {*listed["resources"], *rules["files"], "kustomization.yaml", "autoscaler.yaml"}
    assert named == {path.name for path in KUBERNETES.glob("*.yaml")}
    # `kubectl apply -k` reads the secrets from a folder that git ignores.
    page = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    for each in listed["secretGenerator"]:
        for file in [*each.get("files", ()), *each.get("envs", ())]:
            name = file.removeprefix("secrets/")
            assert re.search(rf"(?:>|--tokens) {name}\)?\n", page), f"docs/deploy.md misses {file}"
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8")
    assert f"/{(KUBERNETES / 'secrets').relative_to(ROOT).as_posix()}/\n" in ignored


def test_selectors_and_ports_fit_together() -> None:
    """Services, budget, policy and probes refer to labels and ports that the pods have."""
    labels = resource("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels == resource("Deployment")["spec"]["selector"]["matchLabels"] == SELECTOR
    assert resource("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == SELECTOR
    assert resource("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == SELECTOR
    (container,) = pod()["containers"]
    ports = {each["name"]: each for each in container["ports"]}
    for name in ("ratekeeper", "ratekeeper-grpc", "ratekeeper-gossip"):
        service = resource("Service", name)["spec"]
        assert service["selector"] == SELECTOR
        for each in service["ports"]:
            target = ports[each["targetPort"]]
            assert each["port"] == target["containerPort"]
            assert each.get("protocol") == target.get("protocol")
    # Nodes find each other before they are ready. Envoy must not call them before.
    for name, not_ready in (("ratekeeper-grpc", False), ("ratekeeper-gossip", True)):
        headless = resource("Service", name)["spec"]
        assert headless["clusterIP"] == "None"
        assert headless.get("publishNotReadyAddresses", False) is not_ready
    allowed = [
        port for rule in resource("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]
    ]
    assert {(each["port"], each.get("protocol")) for each in allowed} == {
        (name, each.get("protocol")) for name, each in ports.items()
    }
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"


def mounted() -> dict[str, Path]:
    """Return the files in the volumes of a pod, by path; each stands in deploy/kubernetes."""
    listed = kustomization()
    made = {
        each["name"]: [KUBERNETES / file for file in each.get("files", ())]
        for each in [*listed["configMapGenerator"], *listed["secretGenerator"]]
    }
    volumes = {
        each["name"]: each.get("configMap", {}).get("name") or each["secret"]["secretName"]
        for each in pod()["volumes"]
        if "emptyDir" not in each
    }
    (container,) = pod()["containers"]
    return {
        f"{mount['mountPath']}/{file.name}": file
        for mount in container["volumeMounts"]
        if mount["name"] in volumes
        for file in made[volumes[mount["name"]]]
    }


def pod_arguments(files: Mapping[str, Path], data: Path, address: str) -> list[str]:
    """Return the arguments of the container, with files of this machine and an address."""
    (container,) = pod()["containers"]
    given = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert given == {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
    found = []
    for argument in container["args"]:
        text = argument.replace("$(POD_IP)", address).replace("$(POD_NAME)", f"pod-{address}")
        for path, file in files.items():
            text = text.replace(path, str(file))
        text = text.replace("=/var/lib/ratekeeper", f"={data}")
        assert "=/etc/" not in text, f"no volume has the file of {argument}"
        found.append(text)
    return found


def test_a_pod_shuts_down_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is not ready before it stops listening, and it is not killed before it has answered."""
    arguments = pod_arguments(mounted(), tmp_path, "10.0.0.5")
    env = {"RATEKEEPER_STORE": "redis://:secret@redis:6379"}
    settings = settings_of(monkeypatch, arguments, env)
    assert settings.gossip == "10.0.0.5:7946"
    assert settings.node_id == "pod-10.0.0.5"
    (container,) = pod()["containers"]
    probe = container["readinessProbe"]
    fails = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert settings.drain_seconds > fails
    grace = pod()["terminationGracePeriodSeconds"]
    assert grace > settings.drain_seconds + settings.shutdown_seconds
    # The ports of the container are those that the service listens on.
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == settings.port
    assert settings.grpc.endswith(f":{ports['grpc']}")
    assert settings.gossip.endswith(f":{ports['gossip']}")
    assert settings.peers == (f"dns:ratekeeper-gossip:{ports['gossip']}",)
    # Without Redis, the service rejects gossip: the secret is not optional.
    monkeypatch.undo()
    assert "redis://" in CliRunner().invoke(app, arguments).stderr


def test_a_pod_can_write_only_to_its_volumes() -> None:
    """The root file system is read-only, the user is that of the image, and keys are not public."""
    (container,) = pod()["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert f"{pod()['securityContext']['runAsUser']}:" in value_of("USER")
    writable = {each["name"] for each in pod()["volumes"] if "emptyDir" in each}
    mounts = {each["mountPath"] for each in container["volumeMounts"] if each["name"] in writable}
    assert mounts == {"/var/lib/ratekeeper", "/tmp"}
    (secret,) = [each["secret"] for each in pod()["volumes"] if "secret" in each]
    assert secret["defaultMode"] == 0o440


class Volume:
    """The files of a ConfigMap or a Secret, as the kubelet mounts them.

    Each file is a symbolic link to `..data/NAME`, and `..data` is a link to a folder. A change is a
    new folder, to which the kubelet moves `..data`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def use(self, files: Mapping[str, str]) -> None:
        """Mount the files, or replace them."""
        written = self.folder / f"..{secrets.token_hex(4)}"
        written.mkdir(parents=True)
        for name, text in files.items():
            (written / name).write_text(text, encoding="utf-8")
            (written / name).chmod(0o400)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        moved = self.folder / "..data_tmp"
        moved.symlink_to(written.name)
        moved.replace(self.folder / "..data")


def test_two_pods_share_limits_and_gossip(tmp_path: Path) -> None:
    """With the arguments of the manifest, each on an own address and the same port, like pods.

    `localhost` is the name that resolves to a pod, as the headless service resolves to all of them.
    The document of the ConfigMap is in force, both count in one Redis, and a change reaches both.
    """
    rules = (KUBERNETES / "limits.yaml").read_text(encoding="utf-8")
    admin = secrets_of(tmp_path)["admin"]
    tokens = (tmp_path / "tokens.json").read_text(encoding="utf-8")
    volume = Volume(tmp_path / "volume")
    files = {"gossip.key": secrets.token_hex(32), "tokens.json": tokens, "limits.yaml": rules}
    volume.use(files)
    mounts = {path: volume.folder / file.name for path, file in mounted().items()}
    addresses, port = (HOST, "127.0.0.2"), free_port()

    def made_for(address: str, store: str) -> DeployedService:
        made = DeployedService(RATEKEEPER_STORE=store)
        # Not in `tmp_path`: the socket of gossip is in this folder, and its path has 107 bytes.
        text = "\n".join(pod_arguments(mounts, made.data, address))
        local = text.replace("0.0.0.0", address).replace("=8080", "=0").replace(":8081", ":0")
        local = local.replace("dns:ratekeeper-gossip:", "dns:localhost:")
        local = local.replace("7946", str(port)).replace("--workers=2", "--workers=1")
        made.arguments = local.splitlines()
        return made

    headers = {"Authorization": f"Bearer {admin}"}
    with Single() as redis, ExitStack() as stack:
        pods = [stack.enter_context(made_for(each, f"{redis.uri}?{PATIENT}")) for each in addresses]

        def alive(each: ServiceProcess) -> set[str]:
            nodes = each.ask("GET", "/v1/admin/fleet", headers=headers).data["nodes"]
            return {node["address"] for node in nodes if node["state"] == "alive"}

        expected = {f"{each}:{port}" for each in addresses}
        until(
            lambda: all(alive(each) == expected for each in pods),
            "both pods know each other",
            GOSSIP_SECONDS_MAX,
        )
        (container,) = pod()["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            assert [each.ask("GET", path).status for each in pods] == [200, 200]
        login = {"ip": "192.0.2.1", "endpoint": "/login", "method": "POST"}
        answers = [pods[n % 2].ask("POST", "/v1/check", login, headers).status for n in range(6)]
        assert answers == [200] * 5 + [429]
        volume.use({**files, "limits.yaml": rules.replace("id: login", "id: log-in")})
        until(
            lambda: all(
                each.ask("POST", "/v1/check", login, headers).data["rule"] == "log-in"
                for each in pods
            ),
            "the changed rules are in force",
            GOSSIP_SECONDS_MAX,
        )
