"""OpenVINO IR: `model.xml` with its weights in `model.bin`."""
