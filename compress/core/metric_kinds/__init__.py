"""How metrics are computed that are no mean over samples."""
