"""headrace: from clicks in a lake to a recommender retrained every day and scores in a warehouse."""

__version__ = "0.1.0"
