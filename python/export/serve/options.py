"""Objects that all parts of a server share: options and limits, the check of the token, errors and metrics."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: Upper bounds of the buckets of the histograms of seconds and of rows.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
#: Status of a request whose client closed the connection before its answer, as nginx logs it.
CLIENT_GONE = 499

#: Control of the loaded versions: by the repository, which is polled, or explicitly by requests.
Control = Literal["poll", "explicit"]


class RequestError(Exception):
    """Error that answers a request.

    Attributes:
        status: HTTP status; `grpc_service` maps it to gRPC's code.
        message: the fault, its place, and the expected value.
        retry_after: seconds after which the request may succeed; None: it would fail again.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests, connections and waiting.

    Attributes:
        body_bytes: largest body of a request.
        json_bytes: largest JSON of a request; while it is parsed, nothing else is answered.
        pending_bytes: most bytes of all bodies in memory, being read or waiting.
        rows: most rows of a request.
        batch_rows: most rows of merged requests.
        batch_delay: seconds that a first request waits for others while nothing runs; 0: no wait.
        timeout: seconds that a request may wait for its run.
        receive_seconds: seconds from its first byte in which a request must arrive, and from the start of a connection
            in which the first one must.
        send_seconds: seconds in which a client must take some of its answer.
        idle_seconds: seconds after which a connection without requests is closed.
        header_bytes: largest head of a request.
        connections: most connections at the same time.
    """

    body_bytes: int = 64 << 20
    json_bytes: int = 8 << 20
    pending_bytes: int = 512 << 20
    rows: int = 1 << 16
    #: Larger runs do not cost less per row, and the first of merged requests would wait for the last.
    batch_rows: int = 256
    batch_delay: float = 0.0
    timeout: float = 1.0
    receive_seconds: float = 10.0
    send_seconds: float = 10.0
    idle_seconds: int = 60
    header_bytes: int = 32 << 10
    connections: int = 4096


@dataclass(frozen=True)
class ServeOptions:
    """Options of `headrace serve`.

    Attributes:
        repository: folder of the models.
        host: address that accepts connections.
        http_port: port of HTTP; 0: any free one.
        grpc_port: port of gRPC; 0: any free one; None: no gRPC.
        control: see Control.
        models: models that are loaded at the start if `control` is explicit; empty: all.
        versions: number of newest versions of a model that stay loaded.
        poll_seconds: seconds between two polls of the repository.
        threads: threads of onnxruntime within a run.
        certificate: file of the TLS certificate (PEM), with `key`; None: no TLS.
        key: file of the TLS key.
        token: token that requests must have; None: no token.
        allow_nan: whether NaN is a valid value of float inputs.
        limits: see RequestLimits.
    """

    repository: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int | None = 8001
    control: Control = "poll"
    models: tuple[str, ...] = ()
    versions: int = 1
    poll_seconds: float = 5.0
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    allow_nan: bool = False
    limits: RequestLimits = RequestLimits()


class Access:
    """Check of the token that requests must have, `Authorization: Bearer TOKEN`; without a token all are admitted."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else b"Bearer " + token.encode()

    def check(self, authorization: bytes) -> None:
        """Raise RequestError (401) if the header does not have the token."""
        if self._expected is not None and not hmac.compare_digest(authorization, self._expected):
            raise RequestError(401, "this server asks for a token: Authorization: Bearer TOKEN")


class Metrics:
    """Metrics of one server, separate from the process's other metrics."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        labels = ("model", "version")
        self.requests = Counter(
            "headrace_serve_requests", "Answers by status of HTTP", ("protocol", "status"), registry=r
        )
        self.seconds = Histogram(
            "headrace_serve_request_seconds", "From arrival to answer", buckets=_SECONDS, registry=r
        )
        self.batches = Histogram("headrace_serve_batch_rows", "Rows of a run", labels, buckets=_ROWS, registry=r)
        self.merged = Counter("headrace_serve_merged_requests", "Requests that runs answered", labels, registry=r)
        self.run_seconds = Counter("headrace_serve_run_seconds", "Seconds of onnxruntime", labels, registry=r)
        self.refused = Counter("headrace_serve_refused_requests", "Refused for those that waited", labels, registry=r)
        self.late = Counter("headrace_serve_late_requests", "Waited longer than they may", labels, registry=r)
        self.current = Gauge("headrace_serve_current_version", "Where no version is named", ("model",), registry=r)
        self.failures = Gauge("headrace_serve_failed_versions", "Versions that cannot be loaded", registry=r)
        self.pending_bytes = Gauge("headrace_serve_pending_bytes", "Bodies in memory", registry=r)

    def of_model(self, model: str, version: int) -> ModelMetrics:
        """Return the metrics of one version of a model."""
        return ModelMetrics(self, model, str(version))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """Metrics of one version of a model."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics, self._labels = metrics, (model, version)
        self._batches = metrics.batches.labels(model, version)
        self._merged = metrics.merged.labels(model, version)
        self._seconds = metrics.run_seconds.labels(model, version)
        self.refused = metrics.refused.labels(model, version)
        self.late = metrics.late.labels(model, version)

    def batch(self, rows: int, requests: int, seconds: float) -> None:
        """Count a run."""
        self._batches.observe(rows)
        self._merged.inc(requests)
        self._seconds.inc(seconds)

    def remove(self) -> None:
        """Remove the metrics of an unloaded version; with a new version every day they would accumulate."""
        metrics = self._metrics
        for family in (metrics.batches, metrics.merged, metrics.run_seconds, metrics.refused, metrics.late):
            family.remove(*self._labels)
