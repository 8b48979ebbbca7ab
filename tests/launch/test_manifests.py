"""examples/kubernetes: the manifests are as the API's schemas have them, and say what `p3 exec` needs.

Kubernetes' own kinds are checked against the strict schemas of the oldest and the newest release that
kubernetes-validate has, in which an unknown field is an error. MXJob's CRD is not on PyPI: its fields are compared with
the models that the operator's own package has, its pods' templates with Kubernetes' schema, and its enumerations with
what the operator documents.
"""

import copy

import pytest
from processes import ROOT

from p3.launch.launchers.adapters import KUBERNETES
from p3.settings import Settings

yaml = pytest.importorskip("yaml", reason="no PyYAML here: pip install '.[test]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not here: pip install '.[test]'")

FOLDER = ROOT / "examples" / "kubernetes"
RELEASES = (kubernetes_validate.utils.all_versions()[0].partition("-")[0], kubernetes_validate.latest_version())


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def named(kind):
    (found,) = [one for name in ("secret.yaml", "job.yaml") for one in documents(name) if one["kind"] == kind]
    return found


def validate(document):
    for release in RELEASES:
        kubernetes_validate.validate(document, release, strict=True)


def variables(container):
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize("kind", ["Secret", "Service", "Job"])
def test_manifests_are_as_the_schemas_have_them(kind):
    validate(named(kind))


@pytest.mark.parametrize("path, value", [
    (("spec", "completions"), "four"),
    (("spec", "completionMod"), "Indexed"),
    (("spec", "template", "spec", "containers", 0, "env", 0, "valueFrm"), {}),
    (("spec", "template", "spec", "containers", 0, "env", 0, "value"), 4),
])  # fmt: skip
def test_what_the_schemas_do_not_have_is_found(path, value):
    job = copy.deepcopy(named("Job"))
    at = job
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


def test_the_indexed_job_says_what_p3_exec_needs():
    job, service, secret = named("Job"), named("Service"), named("Secret")
    pod = job["spec"]["template"]["spec"]
    env = variables(pod["containers"][0])
    assert job["spec"]["completionMode"] == "Indexed"
    assert env["DMLC_NUM_WORKER"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    # <job>-<index>.<service>, where the service's selector finds the job's pods.
    assert env["DMLC_PS_ROOT_URI"] == "%s-0.%s" % (job["metadata"]["name"], service["metadata"]["name"])
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    reference = env.pop("P3_SECRET")["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"] and reference["key"] in secret["stringData"]
    Settings.from_env(env)  # knows them all
    place = KUBERNETES.place({**env, "JOB_COMPLETION_INDEX": "3"})
    assert (place.rank, place.size, place.machines) == (3, 4, 4)


def check_room(pod):
    """Every container says what it needs; and a worker has more than 64 MiB of /dev/shm, within its memory."""
    (container,) = pod["containers"]
    asked = container["resources"]
    assert set(asked["requests"]) == {"cpu", "memory"} and asked["limits"]["memory"] == asked["requests"]["memory"]
    if container["command"][2:]:
        (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/dev/shm"]
        (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert int(volume["emptyDir"]["sizeLimit"][:-2]) < int(asked["limits"]["memory"][:-2])


def test_the_indexed_job_asks_for_room_a_node_for_each_pod_and_snapshots_of_its_own():
    pod = named("Job")["spec"]["template"]["spec"]
    check_room(pod)
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == named("Service")["spec"]["selector"]
    (container,) = pod["containers"]
    names = [one["name"] for one in container["env"]]
    env = variables(container)
    assert env["JOB"] == {"fieldRef": {"fieldPath": "metadata.labels['job-name']"}}
    # Kubernetes puts in what stands further up in the list alone.
    assert env["P3_SNAPSHOT_DIR"].endswith("/$(JOB)") and names.index("JOB") < names.index("P3_SNAPSHOT_DIR")
    assert env["P3_SNAPSHOT_DIR"].startswith(container["volumeMounts"][0]["mountPath"] + "/")


def test_the_secret_that_stands_in_for_yours_is_refused():
    with pytest.raises(ValueError, match="at least 16 characters"):
        Settings.from_env({"P3_SECRET": named("Secret")["stringData"]["secret"]})


@pytest.fixture(scope="module")
def kubeflow():
    """The models of the operator's package: a thousand, which only here are worth the seconds of their import."""
    name = "kubeflow.training.models"
    return pytest.importorskip(name, reason="no kubeflow-training here: pip install '.[test]'")


def fields_of(model):
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}


def check_against_models(document, model, models, where="MXJob"):
    fields = fields_of(model)
    assert set(document) <= set(fields), (where, set(document) - set(fields))
    for name, value in document.items():
        kind, at = fields[name], "%s.%s" % (where, name)
        if kind == "V1PodTemplateSpec":
            validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": value})
        elif kind.startswith("dict(str, "):
            for key, item in value.items():
                check_against_models(item, getattr(models, kind[10:-1]), models, "%s.%s" % (at, key))
        elif kind.startswith("Kubeflow"):
            check_against_models(value, getattr(models, kind), models, at)
        elif kind in ("str", "int", "bool"):
            assert type(value).__name__ == kind, at


def test_the_mxjob_has_the_fields_of_its_operator(kubeflow):
    (job,) = documents("mxjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "MXJob")
    check_against_models(job, kubeflow.KubeflowOrgV1MXJob, kubeflow)
    wrong = copy.deepcopy(job)
    wrong["spec"]["mxReplicaSpecs"]["Worker"]["replica"] = 2
    with pytest.raises(AssertionError, match="replica"):
        check_against_models(wrong, kubeflow.KubeflowOrgV1MXJob, kubeflow)


def test_the_mxjob_says_what_p3_exec_needs():
    (job,) = documents("mxjob.yaml")
    spec = job["spec"]
    assert spec["jobMode"] == "MXTrain" and set(spec["mxReplicaSpecs"]) == {"Scheduler", "Server", "Worker"}
    for role, replicas in spec["mxReplicaSpecs"].items():
        assert replicas["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = replicas["template"]["spec"]["containers"]
        check_room(replicas["template"]["spec"])
        assert container["name"] == "mxnet"  # the operator gives the variables to this one
        assert container["command"][:2] == ["p3", "exec"] and (len(container["command"]) > 2) == (role == "Worker")
        assert variables(container)["P3_SECRET"] == {"secretKeyRef": {"name": "train", "key": "secret"}}
