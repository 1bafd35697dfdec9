"""The source `vectors` of `score.candidates.sources`: items near a user by a model in retrieval form."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.candidate_source import CandidateSource


class VectorSource(CandidateSource):
    """The items whose vectors have the greatest dot products with the user's, by the model that scores.

    Of a model that learned nothing of a user there are none, nor are items among them of which it learned nothing.
    """

    #: Which kind it is.
    kind: Literal["vectors"] = "vectors"
    #: exact: all items are compared. ivf: those of the cells of an index that are nearest to the user. auto: the index
    #: from 1 million items on.
    index: Literal["auto", "exact", "ivf"] = "auto"
    #: With the index: the share of the `k` best items that are found, of some users of the run, in the mean; so many
    #: cells are looked at.
    min_recall: float = Field(default=0.95, gt=0, le=1)
