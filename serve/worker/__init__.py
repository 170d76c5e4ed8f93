"""The serving code inside a TorchServe archive: parse requests, run the model, write responses."""
