"""Data without code: images, tables and arrays as they lie, as splits of prepared samples."""
