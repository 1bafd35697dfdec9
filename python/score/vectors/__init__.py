"""The vectors that a model in retrieval form has for users and items."""
