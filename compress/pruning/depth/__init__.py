"""Search the blocks to remove, by the output error that their removal causes."""
