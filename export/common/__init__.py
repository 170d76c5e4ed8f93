"""What several exporters share: targets, host checks, device placement."""
