"""Objects that all parts of a server share: options and limits, the token, the error of refused requests, metrics."""

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

#: Who decides which versions are loaded: the repository, looked at every few seconds, or requests.
Control = Literal["poll", "explicit"]


class RequestError(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP; `grpc_service` has gRPC's code for it.
        message: what is wrong, where, and what is expected.
        retry_after: seconds after which the same request may be answered; None: it would fail again.
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
        body_bytes: of a request's body.
        json_bytes: of its JSON, during whose reading nothing else is answered.
        pending_bytes: of all bodies that are in memory, being read or waiting.
        rows: of a request.
        batch_rows: requests are merged up to so many rows.
        batch_delay: seconds that a first request waits for others while nothing runs; 0: only those that are there.
        timeout: seconds that a request may wait for its run.
        receive_seconds: within which a request must have arrived, from its first byte on, or a new connection's first.
        send_seconds: within which a client must take some of its answer.
        idle_seconds: after which a connection without requests is closed.
        header_bytes: of a request.
        connections: at the same time.
    """

    body_bytes: int = 64 << 20
    json_bytes: int = 8 << 20
    pending_bytes: int = 512 << 20
    rows: int = 1 << 16
    #: A run of more rows costs no less a row, and the first of merged requests would wait for the last.
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
        repository: folder of models.
        host: where connections are taken.
        http_port: 0: any that is free.
        grpc_port: the same; None: no gRPC.
        control: see Control.
        models: loaded at the start where `control` is explicit; empty: all.
        versions: of a model that stay loaded, the newest ones.
        poll_seconds: between two looks at the repository.
        threads: of onnxruntime within one run.
        certificate: file of TLS (PEM), with `key`; None: no TLS.
        key: file of TLS.
        token: that requests must bring; None: none.
        allow_nan: whether a NaN in float inputs is a value.
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
        """Raise RequestError (401) where it is not the token."""
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
        """Remove the metrics of an unloaded version: they would pile up over a year."""
        metrics = self._metrics
        for family in (metrics.batches, metrics.merged, metrics.run_seconds, metrics.refused, metrics.late):
            family.remove(*self._labels)
