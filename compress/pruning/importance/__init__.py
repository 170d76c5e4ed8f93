"""Score channels: weight norms, activations, gradients."""
