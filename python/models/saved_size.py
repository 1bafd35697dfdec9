"""How large a saved model's tables are at most, by its records alone: without torch, and without a look at the rows."""

from __future__ import annotations

import json

from headrace.errors import UserError
from headrace.models.predictor import needed_models
from headrace.storage import Location, StoreAway

_RAW_IDS, _TRAINING = "dynamic", "-training.safetensors"


def saved_rows_bytes(folder: Location) -> int:
    """Bytes of the files with rows of a saved model with embeddings, and of those that it lies upon.

    The tables are no larger: each row is in one file at least.

    Raises:
        UserError: a record is missing or damaged.
    """
    total = 0
    for model in needed_models(folder):
        path = model / "embeddings" / "index.json"
        try:
            index = json.loads(path.read_text())
            files = {c["file"] for c in index["chunks"] if c["state"] == "weight"}
            total += sum(f["bytes"] for f in index["files"] if f["name"] in files)
        except StoreAway:
            raise
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path} is missing or damaged: {e}") from None
    raw = folder / _RAW_IDS
    if raw.is_dir():
        names = [f for f in raw.entries() if f.suffix == ".safetensors" and not f.name.endswith(_TRAINING)]
        total += sum(f.size() for f in names)
    return total
