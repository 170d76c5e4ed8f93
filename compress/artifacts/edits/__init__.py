"""Architecture changes that a recipe records and replays: sliced, removed or wrapped modules."""
