"""A handler of TorchServe without a model: what TorchServe takes by itself."""

ANSWER = bytes(640)
"""As long as the outputs of 16 rows of ten classes."""


class EchoHandler:
    """Answers every request with the same bytes."""

    def initialize(self, context):
        """Load nothing."""

    def handle(self, data, context):
        return [ANSWER] * len(data)
