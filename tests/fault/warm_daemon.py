"""Daemon that forks Python workers of warm runs: headrace's own, with the modules of tasks imported."""

from __future__ import annotations

from importlib import import_module

from headrace.lake.spark import worker_daemon

if __name__ == "__main__":
    for name in (
        "headrace.features.build.run",
        "headrace.quality.gate.evaluate",
        "headrace.score.run",
        "headrace.train.baseline.run",
        "headrace.train.launch.horovod_spark",
        "torch",
        "xgboost.spark",
    ):
        import_module(name)
    worker_daemon.main()
