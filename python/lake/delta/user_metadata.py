"""What commits of ours say of themselves in their userMetadata: one JSON object, named for what made the commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def said_by(mark: str, user_metadata: str | None) -> Mapping[str, Any] | None:
    """What a commit's userMetadata holds below `mark`; None of a commit of something else."""
    if user_metadata is None or mark not in user_metadata:
        return None
    try:
        stored = json.loads(user_metadata)
    except ValueError:
        return None
    return stored.get(mark) if isinstance(stored, dict) else None
