"""A command in a pod, by the operator of Airflow's provider for Kubernetes. Imported where a pod is asked for alone.

Not by its operator for Spark: that wants the Spark operator in the cluster, starts a program by spark-submit, which a
stage without Spark is not, and tells a state where retries need the exit code.
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

from headrace_airflow.outside import Master, secrets
from headrace_airflow.pipelines import GPU_POOL, Pipeline
from headrace_airflow.pod_spec import CONTAINER, pod_spec, properties, template_file
from headrace_airflow.settings import SETTINGS

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
