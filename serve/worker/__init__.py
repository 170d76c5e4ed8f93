"""What travels in every ``.mar``: joined into its one ``handler.py``, importing nothing of ours."""
