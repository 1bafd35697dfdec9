"""Models in retrieval form: a vector for a row's user and one for each item, whose dot product is the logit."""
