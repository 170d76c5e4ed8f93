"""Folders of `export_compressed_tensors` in vLLM, which has an environment of its own."""
