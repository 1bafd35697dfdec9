"""A command in a pod, by the operator of Airflow's provider for Kubernetes. Imported where a pod is asked for alone.

Not by its operator for Spark: that wants the Spark operator in the cluster, starts a program by spark-submit, which a
stage without Spark is not, and tells a state where retries need the exit code.

Kubernetes is asked for what the Spark properties of a pipeline and of its profile say. They are Spark's own, of a
driver on Kubernetes (README.md has the table); what is said of executors alone is not for a pod whose Spark is its own.
Rising priority: the profile, the connection's `conf`, the pipeline's `spark.properties`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from airflow.sdk.exceptions import AirflowFailException
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from headrace_airflow.connections import Master, secrets
from headrace_airflow.pipelines import GPU_POOL, Pipeline
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


#: An image may be large, and a queue of pods long.
_START_SECONDS = 3600


class CommandPod(KubernetesPodOperator):
    """A pod that runs a command of `headrace` once. It is removed when it has ended; its log is in the task's.

    Made within a task's own `execute`: what it defers to comes back to that task.
    """

    #: The exit code of the container; None: it has not ended by itself.
    code: int | None = None
    #: The end of its log, where it failed.
    last_output: str = ""

    def __init__(
        self, *, pipeline: Pipeline, place: Master, words: Sequence[str], timeout: timedelta | None, **kwargs: Any
    ) -> None:
        conf = properties(pipeline, place.conf)
        self._pipeline, self._secrets = pipeline, secrets(pipeline)
        self._secret_name = _secret_name(pipeline.name) if self._secrets else None
        gpu = kwargs.get("pool") == GPU_POOL
        name = f"headrace-{_name(pipeline.name)}-{_name(kwargs['task_id'])}"
        try:
            spec = pod_spec(name, words, conf, gpu, self._secret_name)
        except ValueError as e:
            raise AirflowFailException(f"{pipeline.path}: {e}") from e
        super().__init__(
            kubernetes_conn_id=place.kubernetes,
            full_pod_spec=PodGenerator.deserialize_model_dict(spec),
            pod_template_file=template_file(conf),
            base_container_name=CONTAINER,
            # The end of the log of a container that fails: why it did.
            termination_message_policy="FallbackToLogsOnError",
            deferrable=True,
            poll_interval=SETTINGS.poll_seconds,
            startup_timeout_seconds=_START_SECONDS,
            execution_timeout=timeout,
            # A pod's description has its variables.
            log_pod_spec_on_failure=False,
            log_events_on_failure=True,
            **kwargs,
        )

    def start(self, context: Any) -> None:
        """Make the pod, or find the one that a try before this has made; then defer, where it has not ended yet."""
        self.pod_request_obj = self.build_pod_request_obj(context)
        if self._secret_name is not None:
            self._write_secret(self._secret_name, self.pod_request_obj.metadata.namespace, self._secrets)
        self.execute_async(context)

    def _write_secret(self, name: str, namespace: str, values: Mapping[str, str]) -> None:
        """Write the Secret of a pipeline, the same for all of its pods."""
        labels = {"app.kubernetes.io/managed-by": "headrace"}
        metadata = client.V1ObjectMeta(name=name, namespace=namespace, labels=labels)
        secret = client.V1Secret(metadata=metadata, string_data=dict(values), type="Opaque")
        try:
            self.client.create_namespaced_secret(namespace, secret)
        except ApiException as e:
            if e.status != 409:
                raise
            self.client.replace_namespaced_secret(name, namespace, secret)

    def cleanup(self, pod: client.V1Pod, remote_pod: client.V1Pod, *args: Any, **kwargs: Any) -> None:
        """Keep how the container has ended before the pod is removed."""
        statuses = (remote_pod.status.container_statuses if remote_pod and remote_pod.status else None) or []
        for status in statuses:
            if status.name == CONTAINER and status.state and status.state.terminated:
                self.code = status.state.terminated.exit_code
                self.last_output = status.state.terminated.message or ""
        super().cleanup(pod, remote_pod, *args, **kwargs)


def _secret_name(pipeline: str) -> str:
    """Return a name that is no other pipeline's: the hash tells shop_a from shop__a, which have one Kubernetes name."""
    return f"headrace-{_name(pipeline)}-{hashlib.sha256(pipeline.encode()).hexdigest()[:8]}-env"


def _name(text: str) -> str:
    """Return a text as a name that Kubernetes accepts."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
