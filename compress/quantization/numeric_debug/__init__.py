"""A quantized model compared with its float model, layer by layer."""
