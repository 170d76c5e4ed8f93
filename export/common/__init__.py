"""What several exporters share: which graphs a runtime takes, and checks of the host."""
