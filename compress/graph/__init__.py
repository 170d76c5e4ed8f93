"""torch.export programs: tracing, axis bounds, counting multiply-accumulates."""
