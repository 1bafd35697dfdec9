"""Reranking of items into a user's list: diversity, caps, fresh and new items, exploration, and each row's reason."""
