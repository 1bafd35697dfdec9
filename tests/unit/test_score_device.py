"""Scoring on a device: what Spark assigned, and batches in one copy. No GPU is here: what stands in for it is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyspark import SparkConf, TaskContext
from pyspark.resource import ResourceInformation
from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.lake.spark.gpus import gpu_addresses, gpu_profile
from headrace.models import categorical
from headrace.models.categorical import moved_in_one_copy
from headrace.models.predictor import load_predictor
from headrace.score import loaded_model
from headrace.storage import local
from tests.unit.test_models_mapped import columns, save

_TENSORS = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.int64, torch.int32]), st.lists(st.integers(0, 7), min_size=1, max_size=2)
    ),
    max_size=6,
)


@given(_TENSORS, st.sampled_from(["cpu", "meta"]))
def test_a_batch_goes_in_one_copy(specs: list[tuple[torch.dtype, list[int]]], device: str) -> None:
    rng = torch.Generator().manual_seed(1)
    tensors = [torch.randint(-(2**20), 2**20, shape, generator=rng).to(dtype) for dtype, shape in specs]
    moved = moved_in_one_copy(tensors, torch.device(device))
    assert [(x.shape, x.dtype, x.device.type) for x in moved] == [(x.shape, x.dtype, device) for x in tensors]
    assert len({x.untyped_storage()._cdata for x in moved}) <= 1
    if device == "cpu":
        assert all(map(torch.equal, moved, tensors))
        assert all(x.data_ptr() % x.element_size() == 0 for x in moved)


def test_predictions_of_packed_batches_are_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the CPU by another name."""
    folder, calls = save(tmp_path / "model", "fp16"), []
    expected = load_predictor(folder, 1).predict(columns(300))

    def copied(tensors: list[torch.Tensor], device: Any) -> list[torch.Tensor]:
        calls.append(len(tensors))
        return moved_in_one_copy(tensors, torch.device("cpu"))

    monkeypatch.setattr(categorical, "moved_in_one_copy", copied)
    predictor: Any = load_predictor(folder, 1)
    predictor._device = SimpleNamespace(type="stand-in")
    np.testing.assert_array_equal(predictor.predict(columns(300)), expected)
    assert calls == [4]  # numbers, codes, and the values and offsets of one list


@pytest.fixture
def task_with_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A task as Spark's Python worker has it, to which Spark assigned the GPU with the address 5."""
    context = TaskContext._getOrCreate()
    context._resources = {"gpu": ResourceInformation("gpu", ["5"])}
    monkeypatch.setattr(os, "environ", dict(os.environ))
    loaded_model.loaded_model.cache_clear()
    yield
    TaskContext._taskContext = None
    loaded_model.loaded_model.cache_clear()


def test_a_task_computes_on_the_gpu_that_spark_assigned(
    tmp_path: Path, task_with_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(loaded_model, "load_predictor", lambda *args: loads.append(args))
    monkeypatch.setattr(loaded_model.FittedWorkflow, "load", lambda *_, **__: None)
    for _ in range(2):  # once a process
        loaded_model.loaded_model(local(tmp_path), 1, None, None, True)
    assert [device for *_, device, _ in loads] == ["cuda"]
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("5", "PCI_BUS_ID")
    loaded_model.loaded_model(local(tmp_path), 1, None, None)
    assert loads[-1][-2] == "cpu"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert gpu_addresses() == ()
    with pytest.raises(UserError, match="Spark assigned none"):
        loaded_model.loaded_model(local(tmp_path), 1, None, None, True)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="GPU"):
            load_predictor(save(tmp_path / "model", "fp32"), 1, device="cuda")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"spark.master": "spark://head:7077"}, None),
        ({"spark.master": "local[2]", "spark.task.resource.gpu.amount": "0.125"}, None),
        (
            {
                "spark.master": "spark://head:7077",
                "spark.task.resource.gpu.amount": "0.125",
                "spark.executor.resource.gpu.amount": "1",
                "spark.executor.cores": "8",
            },
            {"cpus": 8.0, "gpu": 1.0},
        ),
    ],
)
def test_a_task_asks_for_a_gpu_of_its_own(settings: dict[str, str], expected: dict[str, float] | None) -> None:
    conf = SparkConf(loadDefaults=False)
    conf._conf, conf._jconf = settings, None
    session = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf, master=settings["spark.master"]))
    with pytest.MonkeyPatch.context() as patch:  # the request alone: no JVM is asked
        patch.setattr("pyspark.SparkContext._jvm", None)
        profile = gpu_profile(cast(SparkSession, session))
        assert (profile and {k: v.amount for k, v in profile.taskResources.items()}) == expected
