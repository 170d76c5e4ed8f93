"""Decoders with a cache of keys and values, as onnxruntime-genai reads them."""
