"""The code that travels in an archive: reads requests, asks the model, writes responses."""
