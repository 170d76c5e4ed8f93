"""The TorchServe archive: written, started and compared with its source."""
