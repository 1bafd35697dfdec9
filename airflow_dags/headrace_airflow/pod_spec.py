"""The pod of a command: what Kubernetes is asked for, from the Spark properties of a pipeline and of its profile.

They are Spark's own, of a driver on Kubernetes (README.md has the table); what is said of executors alone is not
for a pod whose Spark is its own. Rising priority: the profile, the connection's `conf`, the pipeline's
`spark.properties`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_airflow.pipelines import Pipeline
from headrace_airflow.settings import SETTINGS

CONTAINER = "headrace"
_DRIVER = "spark.kubernetes.driver."
#: Of spark.kubernetes.driver. ...: with a name behind them.
_NAMED = ("volumes.", "secretKeyRef.", "label.", "annotation.", "node.selector.")
_PLAIN = ("container.image", "request.cores", "limit.cores", "podTemplateFile")
_VOLUME = re.compile(r"volumes\.(\w+)\.([a-z0-9-]+)\.(mount|options)\.(\w+)")
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)b?", re.IGNORECASE)
_MIB = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1024 * 1024}


def properties(pipeline: Pipeline, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the Spark properties that apply to a pipeline's pods.

    Args:
        pipeline: whose.
        conf: those of the connection.
    """
    profile = SETTINGS.checkout / "conf" / "spark" / f"{pipeline.value('spark.profile', 'cpu')}.conf"
    lines = profile.read_text(encoding="utf-8").splitlines() if profile.is_file() else []
    defaults = dict(line.split(None, 1) for line in lines if line.strip() and not line.startswith("#"))
    overrides = pipeline.value("spark.properties", {})
    memory = str(pipeline.value("spark.driver_memory", "3g"))
    return {
        **defaults,
        "spark.driver.memory": memory,
        **conf,
        **{str(key): str(value) for key, value in overrides.items()},
    }


def pod_spec(
    name: str, words: Sequence[str], conf: Mapping[str, str], gpu: bool = False, secret: str | None = None
) -> dict[str, Any]:
    """Return the pod, in the terms of Kubernetes' API.

    Args:
        name: of the pod; the provider adds to it.
        words: the command.
        conf: Spark properties.
        gpu: whether it is to have the GPUs that they ask for.
        secret: the Secret whose entries are variables of the container.

    Raises:
        ValueError: there is no image, or a property of drivers that is not known here.
    """
    image = conf.get(f"{_DRIVER}container.image") or conf.get("spark.kubernetes.container.image")
    if not image:
        raise ValueError(
            "no image for the pods: give spark.kubernetes.container.image in the pipeline's spark.properties or in the "
            'connection\'s extra, "conf"'
        )
    for key in conf:
        rest = key.removeprefix(_DRIVER)
        if rest != key and rest not in _PLAIN and not rest.startswith(_NAMED):
            raise ValueError(f"{key} is not known to the pods of headrace: use {_DRIVER}podTemplateFile")
    volumes, mounts = _volumes(_named(conf, f"{_DRIVER}volumes.", keep="volumes."))
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": [words[0]],
        "args": list(words[1:]),
        "env": _env(conf),
        "resources": _resources(conf, gpu),
        "volumeMounts": mounts,
    }
    if pull := conf.get("spark.kubernetes.container.image.pullPolicy"):
        container["imagePullPolicy"] = pull
    if secret is not None:
        container["envFrom"] = [{"secretRef": {"name": secret}}]
    selector = _named(conf, "spark.kubernetes.node.selector.") | _named(conf, f"{_DRIVER}node.selector.")
    pulled_by = conf.get("spark.kubernetes.container.image.pullSecrets", "")
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "nodeSelector": selector,
        "imagePullSecrets": [{"name": word.strip()} for word in pulled_by.split(",") if word.strip()],
    }
    if account := conf.get("spark.kubernetes.authenticate.driver.serviceAccountName"):
        spec["serviceAccountName"] = account
    metadata: dict[str, Any] = {
        "name": name,
        "labels": _named(conf, f"{_DRIVER}label."),
        "annotations": _named(conf, f"{_DRIVER}annotation."),
    }
    if namespace := conf.get("spark.kubernetes.namespace"):
        metadata["namespace"] = namespace
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def template_file(conf: Mapping[str, str]) -> str | None:
    """Return the file with a pod's further settings, or None."""
    return conf.get(f"{_DRIVER}podTemplateFile")


def _named(conf: Mapping[str, str], prefix: str, keep: str = "") -> dict[str, str]:
    return {keep + key.removeprefix(prefix): value for key, value in conf.items() if key.startswith(prefix)}


def _env(conf: Mapping[str, str]) -> list[dict[str, Any]]:
    plain = {"PYTHONUNBUFFERED": "1"} | _named(conf, "spark.kubernetes.driverEnv.")
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    for name, reference in _named(conf, f"{_DRIVER}secretKeyRef.").items():
        secret, _, key = reference.partition(":")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def _resources(conf: Mapping[str, str], gpu: bool) -> dict[str, dict[str, str]]:
    requests, limits = {}, {}
    if cores := conf.get(f"{_DRIVER}request.cores") or conf.get("spark.driver.cores"):
        requests["cpu"] = cores
    if most := conf.get(f"{_DRIVER}limit.cores"):
        limits["cpu"] = most
    heap, overhead = conf.get("spark.driver.memory"), conf.get("spark.driver.memoryOverhead")
    if heap:
        requests["memory"] = f"{_mib(heap) + (_mib(overhead) if overhead else 0)}Mi"
        if overhead:  # otherwise it is not known how much ranks and C++ take beside the JVM
            limits["memory"] = requests["memory"]
    if gpu and (amount := conf.get("spark.driver.resource.gpu.amount")):
        limits[f"{conf.get('spark.driver.resource.gpu.vendor', 'nvidia.com')}/gpu"] = amount
    return {"requests": requests, "limits": limits}


def _mib(size: str) -> int:
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"'{size}' is not a size as Spark spells it: 512m, 3g")
    return max(1, round(int(match[1]) * _MIB[match[2].lower()]))


def _volumes(conf: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return volumes and mounts by spark.kubernetes.driver.volumes.TYPE.NAME.mount.path and .options.KEY."""
    volumes: dict[str, dict[str, Any]] = {}
    mounts: dict[str, dict[str, Any]] = {}
    for key, value in conf.items():
        match = _VOLUME.fullmatch(key)
        if match is None:
            raise ValueError(f"spark.kubernetes.driver.{key} is not a volume's type, name and setting")
        kind, name, part, setting = match.groups()
        volume = volumes.setdefault(name, {"name": name, kind: {}})
        mount = mounts.setdefault(name, {"name": name})
        if part == "options":
            volume[kind][setting] = value
        elif setting == "path":
            mount["mountPath"] = value
        else:
            mount[setting] = value == "true" if setting == "readOnly" else value
    return list(volumes.values()), list(mounts.values())
