"""Properties of a session."""

from __future__ import annotations

import pytest

from headrace.config import Spark
from headrace.errors import UserError
from headrace.lake.session import properties
from headrace.workspace import Workspace

ZONE = "spark.sql.session.timeZone"


def test_sessions_are_in_utc(ws: Workspace) -> None:
    assert properties(Spark(), ws)[ZONE] == "UTC"
    with pytest.raises(UserError, match=r"spark\.sql\.session\.timeZone is 'Europe/Berlin'.*is source\.timezone"):
        properties(Spark(properties={ZONE: "Europe/Berlin"}), ws)
