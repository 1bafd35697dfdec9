"""Settings of the formats that the checks of a spec know; imports nothing of Spark."""

from __future__ import annotations

from headrace.config.formats import FileFormat


class Criteo(FileFormat):
    """Criteo's click logs."""

    reader = "headrace_datasets.readers:CriteoReader"


class TalkingData(FileFormat):
    """The TalkingData AdTracking Fraud Detection log."""

    reader = "headrace_datasets.readers:TalkingDataReader"


class MovieLens(FileFormat):
    """The original `ratings.dat` of MovieLens."""

    reader = "headrace_datasets.readers:RatingsReader"
    columns = ("user_id", "item_id", "label", "split")
    own_times = True


class MovieLensNcf(FileFormat):
    """The split of He et al. (2017) of MovieLens."""

    reader = "headrace_datasets.readers:NcfReader"
    columns = ("user_id", "item_id", "label", "split")
    own_times = True


class LightGcn(FileFormat):
    """The split of He et al. (2020): two files of lists."""

    reader = "headrace_datasets.readers:ListsReader"
    columns = ("user_id", "item_id", "label", "split")


class UserItems(FileFormat):
    """Lines of a user and an item, in the order of time."""

    reader = "headrace_datasets.readers:UserItemsReader"
    columns = ("user_id", "item_id", "history", "label", "split")
