"""Post-training quantization: prepare, calibrate, correct, convert."""
