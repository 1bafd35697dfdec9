"""From ranked items to a user's list: diversity, caps, fresh and new items, exploration, and why each row is there."""
