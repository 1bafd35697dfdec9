"""Skips where a rack is not to be had."""

from __future__ import annotations

import pytest

from bench.rack.hosts import NoRack, rack


@pytest.fixture(scope="session", autouse=True)
def _namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        with rack(tmp_path_factory.mktemp("rack") / "hosts", 1):
            pass
    except NoRack as e:
        pytest.skip(f"no network namespaces here: {e}")
