"""What every package contains: model card, provenance, interface, recorded outputs."""
