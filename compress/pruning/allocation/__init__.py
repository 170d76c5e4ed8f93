"""Allocate how many channels of each group stay, and search plans within a budget."""
