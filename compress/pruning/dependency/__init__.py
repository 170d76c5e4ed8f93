"""Trace which channels are coupled: labels propagated through the exported graph."""
