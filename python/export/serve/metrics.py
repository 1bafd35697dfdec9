"""Metrics of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


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
