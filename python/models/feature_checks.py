"""Which features a model may be told to look at."""

from __future__ import annotations

from headrace.errors import UserError, nearest
from headrace.models.inputs import InputFeatures


def check_feature(features: InputFeatures, key: str, name: str, *, is_list: bool) -> None:
    """A categorical feature, a list of ids or of one id a row.

    Args:
        features: the dataset's.
        key: where the spec has the name, for the message.
        name: the feature.
        is_list: which of the two it must be.

    Raises:
        UserError: there is no such feature.
    """
    known = [f for f in features.categorical if (f in features.lists) is is_list]
    if name not in known:
        kind = "a list of ids" if is_list else "of one id a row"
        raise UserError(
            f"{key}: '{name}' is no categorical feature, {kind}{nearest(name, known)}; there are: {', '.join(known)}"
        )
