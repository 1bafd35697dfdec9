"""The rows that a few pairs look up, read by the task itself from the saved files."""

from __future__ import annotations

import pyarrow as pa

from headrace.models.joined import read_rows, set_rows
from headrace.models.predictor import network_folder, network_of
from headrace.score.joined.needed import CodesOfUsers
from headrace.score.rank.blocks import TaskInputs


def take_few_rows(task: TaskInputs, users: pa.RecordBatch, items: int) -> None:
    """Give the model the rows of its joined tables that some users look up with the first items.

    Args:
        task: the items and the model, which is opened where it is not.
        users: the key and the user's columns, [n].
        items: how many, at most.
    """
    network, folder = network_of(task.load()[0]), network_folder(task.model)
    assert network is not None
    assert folder is not None
    needed = CodesOfUsers(task)
    needed.add_first_items(users, items)
    set_rows(network.model, task.joined, read_rows(folder, network.model, task.joined, needed.found()))
