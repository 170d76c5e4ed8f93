"""The report as a page and as a terminal table."""
