"""What every package carries: model card, provenance, interface, recorded answers."""
