"""How much a channel or weight matters: norms, activations, gradients."""
