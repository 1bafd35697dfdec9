"""Click logs whose columns are known, as people have them: written by hand, not by headrace."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

START = datetime(2026, 3, 1, tzinfo=UTC)


def clicks(rows: int = 4_000, days: int = 4, seed: int = 3) -> pd.DataFrame:
    """Impressions with users, items, what belongs to each, a leak, free text, a constant; clicks are by chance."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 200, rows), rng.integers(0, 60, rows)
    clicked = (rng.random(rows) < 0.2).astype(int)
    seconds = np.sort(rng.integers(0, days * 86_400, rows))
    nouns = np.array(["river", "lake", "dam", "gate", "turbine", "canal", "weir"])
    times = [START + timedelta(seconds=int(s)) for s in seconds]
    return pd.DataFrame(
        {
            "impression_id": [f"i{n:06d}" for n in range(rows)],
            "ts": [t.strftime("%Y-%m-%dT%H:%M:%SZ") for t in times],
            "userId": 10**9 + user,
            "item_id": [f"it{n}" for n in item],
            "user_age": np.where(user % 7 == 0, np.nan, 18 + user % 60),
            "country": np.array(["DE", "AT", "CH"])[user % 3],
            "item_price": np.round(np.exp(item / 8), 2),
            "slot": rng.integers(1, 4, rows),
            "referrer_hash": [f"{n:016x}" for n in rng.integers(0, 2**60, rows)],
            "query": [" ".join(words) + f" {n}" for n, words in enumerate(nouns[rng.integers(0, 7, (rows, 6))])],
            "clicked_at": [t.strftime("%Y-%m-%dT%H:%M:%SZ") if c else "" for t, c in zip(times, clicked, strict=True)],
            "source": "app",
            "clicked": clicked,
        }
    )
