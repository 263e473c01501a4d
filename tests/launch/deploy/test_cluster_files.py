"""What a platform team is given: image, manifests, a `ray up` file, a Slurm script. None may drift from the suite."""

import re
import tomllib

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from experiments.translation.runs import t128_6b
from tests.launch.deploy.files import ROOT, SLURM, asked_of_slurm, text
from tests.launch.deploy.kuberay_fields import faults

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
IMAGE = f"gpipe-suite:{PROJECT['project']['version']}"
KUBERAY = ("raycluster", "rayjob", "storage")
RAY_UP = "launch/deploy/ray_up/cluster.yaml"
FILES = [*(f"launch/deploy/kuberay/{name}.yaml" for name in KUBERAY[:2]), RAY_UP, SLURM]


def manifest(name):
    return yaml.safe_load(text(f"launch/deploy/kuberay/{name}.yaml"))


CLUSTER = manifest("raycluster")["spec"]
HEAD, WORKERS = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"][0]
CONTAINERS = [container for group in (HEAD, WORKERS) for container in group["template"]["spec"]["containers"]]
"""One of the head, one of the workers."""


def test_the_two_manifests_make_the_same_cluster():
    assert manifest("rayjob")["spec"]["rayClusterSpec"] == CLUSTER
    assert CLUSTER["workerGroupSpecs"] == [WORKERS]
    assert len(CONTAINERS) == 2


def test_pods_are_reached_by_one_another_and_else_only_where_ray_asks_for_the_token():
    policy = manifest("network")
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    spec, (among, jobs) = policy["spec"], policy["spec"]["ingress"]
    assert spec["policyTypes"] == ["Ingress"]
    (label,) = spec["podSelector"]["matchExpressions"]
    assert among == {"from": [{"podSelector": spec["podSelector"]}]}
    assert jobs == {"ports": [{"port": 8265, "protocol": "TCP"}]}
    assert label["operator"] == "Exists"
    assert all(label["key"] in group["labels"] for group in (HEAD, WORKERS))


def places(value, above=None):
    """Every place below a value: the name of its map or list, the map or list, and the key or index."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield above, value, key
        yield from places(one, key)


def ray_up():
    return yaml.safe_load(text(RAY_UP))


FREE = {"rayStartParams", "labels", "nodeSelector", "limits", "requests"}
"""Maps whose keys are anybody's."""


@pytest.mark.parametrize("name", KUBERAY)
def test_the_fields_of_a_manifest_are_kuberays_and_none_can_be_misspelled_or_of_another_type(name):
    whole = manifest(name)
    assert faults(whole) == []
    for above, parent, key in [*places(whole)]:
        good = parent[key]
        if isinstance(key, str) and above not in FREE:
            parent[f"{key}s"] = parent.pop(key)
            assert faults(whole), f"{key} of {above} was misspelled"
            del parent[f"{key}s"]
        parent[key] = {} if isinstance(good, str | int) else "text"
        assert faults(whole), f"{key} of {above} was {parent[key]!r}"
        parent[key] = good
    assert faults(whole) == []


def test_what_kuberay_refuses_beyond_the_types_is_not_asked_for():
    for name, longest in (("raycluster", 53), ("rayjob", 47)):
        assert re.fullmatch(rf"[a-z][-a-z0-9]{{0,{longest - 2}}}[a-z0-9]", manifest(name)["metadata"]["name"])
    assert "labels" not in HEAD["rayStartParams"].keys() | WORKERS["rayStartParams"].keys()
    job = manifest("rayjob")["spec"]
    assert job["shutdownAfterJobFinishes"]  # otherwise ttlSecondsAfterFinished is refused
    assert job["ttlSecondsAfterFinished"] > 0
    assert job["preRunningDeadlineSeconds"] > 0
    assert job["backoffLimit"] == 0


def test_the_devices_are_those_that_the_largest_run_needs():
    pipeline, model = t128_6b().pipeline, t128_6b().model
    devices = pipeline.stages * pipeline.replicas
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == WORKERS["maxReplicas"]
    assert WORKERS["replicas"] * CONTAINERS[1]["resources"]["limits"]["nvidia.com/gpu"] == devices
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    for name in FILES:
        assert f"K x R = {pipeline.stages} x {pipeline.replicas} = {devices} devices" in text(name), name
        assert f"K = {pipeline.stages} stages" in text(name), name
        assert f"{2 * model.blocks_per_stack + 3} layers" in text(name), name
        assert f"The fewest devices that hold the model this way are K x 1 = {pipeline.stages}" in text(name), name
    machines = ray_up()["available_node_types"]["gpus"]
    assert machines["min_workers"] == machines["max_workers"] == ray_up()["max_workers"]
    assert machines["min_workers"] * machines["resources"]["GPU"] == devices
    assert ray_up()["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert int(asked_of_slurm()["nodes"]) * int(asked_of_slurm()["gpus-per-node"]) == devices


def test_the_run_is_the_one_of_the_name_at_the_papers_scale():
    assert manifest("rayjob")["spec"]["entrypoint"] == "python -m launch.cli experiment t128_6b --scale paper"
    assert "runtimeEnvYAML" not in manifest("rayjob")["spec"]  # the image has all: nothing is installed


def test_every_pod_shares_the_storage_and_has_shared_memory_for_its_object_store():
    claim = manifest("storage")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group, container in zip((HEAD, WORKERS), CONTAINERS, strict=True):
        pod = group["template"]["spec"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables["GPIPE_STORAGE"] == "/storage"
        claimed = volumes[mounted["/storage"]]["persistentVolumeClaim"]["claimName"]
        assert claimed == claim["metadata"]["name"]
        shared = volumes[mounted["/dev/shm"]]["emptyDir"]
        assert shared["medium"] == "Memory"
        store = int(group["rayStartParams"]["object-store-memory"])
        assert store * 2 <= gibibytes(shared["sizeLimit"]) * 2**30
        assert gibibytes(shared["sizeLimit"]) < gibibytes(container["resources"]["limits"]["memory"]) / 4
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000


def gibibytes(quantity):
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


def test_nobody_enters_without_the_token_which_stands_in_no_file():
    assert CLUSTER["authOptions"] == {"mode": "token", "secretName": "gpipe-token"}
    for container in CONTAINERS:
        secret = [one for one in container["env"] if re.search("TOKEN|KEY|SECRET", one["name"])]
        assert all("value" not in one and "secretKeyRef" in one["valueFrom"] for one in secret)


def test_the_dashboard_can_be_reached_by_its_service():
    assert HEAD["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in CONTAINERS[0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}


# the image


def test_the_versions_are_those_of_the_project():
    assert CLUSTER["rayVersion"] == PINNED["ray"]
    assert all(container["image"].endswith(f"/{IMAGE}") for container in CONTAINERS)
    python = PROJECT["tool"]["mypy"]["python_version"]
    dockerfile = text("Dockerfile")
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == [f"python:{python}-slim-bookworm"]
    assert f"--tag {IMAGE} ." in dockerfile
    assert ray_up()["docker"]["image"].endswith(f"/{IMAGE}")
    assert f"Ray {PINNED['ray']}'s" in text(RAY_UP)
    assert f"torch {PINNED['torch']}'s wheel" in dockerfile
    needed = {re.split(r"[\[=>]", line)[0]: line for line in PROJECT["project"]["dependencies"]}
    assert needed["ray"] == f"ray[train,default]=={PINNED['ray']}"
    assert needed["torch"] == f"torch=={PINNED['torch']}"


def instructions():
    """The Dockerfile's instructions: (name, arguments) with continued lines joined."""
    lines = [line for line in text("Dockerfile").splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


def test_the_image_has_all_that_the_suite_needs_at_the_pinned_versions_and_runs_without_root():
    steps = instructions()
    copied = {word for name, rest in steps if name == "COPY" for word in rest.split()[:-1]}
    packages = {pattern.removesuffix("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], "LICENSE"}
    assert packages | files | {"tests/__init__.py", "tests/gpu"} == copied, "and the check of GPUs"
    assert all((ROOT / name).exists() for name in copied)
    ignored = text(".dockerignore").splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied, "only that is sent to the builder"
    runs = [rest for name, rest in steps if name == "RUN"]
    assert "pip install --constraint constraints.txt ." in runs[1]
    assert "pip install --no-deps ." in runs[2]
    assert "pip check" in runs[2]
    assert [rest for name, rest in steps if name == "USER"] == ["gpipe"]
    assert [name for name, _ in steps].index("USER") > max(i for i, (name, _) in enumerate(steps) if name == "RUN")


# ray up


def test_ray_takes_the_cluster_file():
    whole = prepare_config(ray_up())
    validate_config(whole)
    # the provider's defaults would install Ray's newest build and open the dashboard to all
    assert whole["setup_commands"] == whole["head_setup_commands"] == whole["worker_setup_commands"] == []
    assert "--dashboard-host=127.0.0.1" in whole["head_start_ray_commands"][-1]


def test_machines_of_ray_up_share_storage_and_token():
    options = ray_up()["docker"]["run_options"]
    assert {"--volume=/storage:/storage", "--env=GPIPE_STORAGE=/storage", "--env=RAY_AUTH_MODE=token"} < set(options)
    assert ray_up()["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "RAY_AUTH_TOKEN" not in text(RAY_UP)
    (shared,) = (option for option in options if option.startswith("--shm-size="))
    stores = re.findall(r"--object-store-memory=(\d+)", text(RAY_UP))
    assert [int(store) * 2 <= int(re.sub(r"\D", "", shared)) * 2**30 for store in stores] == [True, True]
    assert ray_up()["docker"]["disable_shm_size_detection"]
