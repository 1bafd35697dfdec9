"""What a store of keys and values must do, and what is put into one: a user's items as JSON, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from headrace.config import Spec
from headrace.identifiers import column
from headrace.publish.online.lmdb_file import open_lmdb
from headrace.publish.online.redis_server import open_redis
from headrace.publish.online.version import Version
from headrace.publish.unfit_keys import KeyLimits, LeftOut, without_unfit_keys
from headrace.stage import RunLock
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class OnlineStore(Protocol):
    """An open store. A reader who asks by the version that is current sees that version whole."""

    #: For people.
    label: str
    #: What a user's key may be.
    key_limits: KeyLimits

    def current(self) -> Version | None:
        """The version that readers see; None where there is none."""
        ...

    def put(self, users: DataFrame, version: Version) -> None:
        """Write the items of all users (columns `user` and `items`, text), then make them current in one step."""
        ...

    def claim(self) -> None:
        """Have versions of earlier runs that stand still refused from now on, as far as the store can.

        Raises:
            LeaseLost: a later run has been at work there.
        """
        ...

    def users_with(self, users: Sequence[str]) -> int:
        """How many of these users it has, in whatever version."""
        ...

    def erase(self, users: Sequence[str]) -> None:
        """Remove these users from all versions."""
        ...


_OPEN: dict[str, Callable[[Spec, Workspace, RunLock | None], AbstractContextManager[OnlineStore]]] = {
    "redis": open_redis,
    "lmdb": open_lmdb,
}


def open_store(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> AbstractContextManager[OnlineStore]:
    """The store of a pipeline that has one, for a `with` block.

    Args:
        spec: the pipeline.
        ws: the workspace.
        lock: that this process is at work on the pipeline; None: the block changes nothing.

    Raises:
        UserError: it cannot be reached, its library is not installed, or it fails in the block.
    """
    assert spec.publish is not None
    assert spec.publish.online is not None, "asked for pipelines that name a store"
    return _OPEN[spec.publish.online.kind](spec, ws, lock)


def items_by_user(df: DataFrame, user: str, item: str) -> DataFrame:
    """One row a user: its key as text, and `[{"item": ..., "score": ...}, ...]` in order of ranks.

    Args:
        df: the day's scores.
        user: name of the user key.
        item: name of the item key.
    """
    from pyspark.sql import functions as F

    user_key, item_key = column(user), column(item)
    ranked = F.sort_array(F.collect_list(F.struct("rank", item_key.alias("item"), "score")))
    items = F.to_json(F.transform(ranked, lambda r: F.struct(r["item"].alias("item"), r["score"].alias("score"))))
    return df.groupBy(user_key.cast("string").alias("user")).agg(items.alias("items"))


def export(store: OnlineStore, df: DataFrame, user: str, item: str, version: Version) -> LeftOut:
    """Make the day's scores what readers of the store see, unless they are already.

    Returns:
        what the store cannot hold, and is not in it.
    """
    fit, left_out = without_unfit_keys(df, {user: store.key_limits}, user)
    if store.current() != version:
        store.put(items_by_user(fit, user, item), version)
    return left_out
