"""Signals, temporary files, disk errors, the log file, facts about the machine."""
