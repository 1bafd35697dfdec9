"""A day on two hosts that share nothing but S3, one of them the driver's: dataset and weights of one machine's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.rack.cluster import PIPELINE, Losses, RackCluster, RackTrial, start_s3, start_spark, store_environ
from bench.rack.hosts import PRIVATE, rack
from bench.rack.scenarios import ScenarioPlan
from headrace.config.installation import checkout, s3_dir
from headrace.storage import local
from tests.s3_server import jars

DS = "2026-01-02"
ONE_MACHINE = PRIVATE / "home" / "one"


def test_features_and_training_are_those_of_one_machine(tmp_path: Path) -> None:
    if not any(jars().glob("s3proxy-*.jar")) or not any(s3_dir().glob("*.jar")):
        pytest.skip("no S3 server, or no Spark for S3: run `make s3proxy s3`")
    logs = tmp_path / "logs"
    local(logs).make_dir()
    with rack(tmp_path / "rack", 2) as hosts:
        start_s3(hosts[0], logs / "s3.log")
        for host in hosts:
            host.environ.update({**store_environ(hosts[0]), "PYTHONPATH": str(checkout()), "COLUMNS": "160"})
        start_spark(hosts[0], hosts, logs)
        cluster = RackCluster(hosts, logs, ScenarioPlan(tmp_path, DS, rows=600).settings)
        trial = RackTrial.create(cluster, "day", DS)
        trial.end(trial.start(hosts[0], "generate", PIPELINE, "--until", DS))
        trial.run_part("train")
        assert trial.scratch(hosts[1])
        assert trial.losses(hosts[0]) == Losses(0, {}, 0)
        cluster.run_alone(ONE_MACHINE, "one.log", "generate", PIPELINE, "--until", DS)
        cluster.run_alone(ONE_MACHINE, "one.log", "run", PIPELINE, "--ds", DS, "--to", "train")
        output = hosts[0].run([sys.executable, "-m", "bench.rack.compare", str(ONE_MACHINE), trial.root, DS, "train"])
    assert "dataset: " in output
    assert "model: " in output
