"""The stage `prune_channels`: remove whole channels, heads and neurons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from compress.pruning.channel_settings import ChannelSettings

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context


class PruneChannels(ChannelSettings):
    """Remove whole channels, heads and neurons, so that the model is really smaller and faster.

    Use it where the model has to be faster on any hardware: what is left is an ordinary model.

        - stage: prune_channels
          target: {latency: 0.5}
          importance: obs
          finetune: {epochs: 3}

    Which channels are coupled follows from the exported graph; no layer has to be annotated. Every
    sliced model is compared with its masked twin: the unsliced model with the same channels set to
    zero, and left out of the statistics of normalisations where these may lose channels. Channels
    whose removal cannot be verified stay, and the artifact's facts say why.
    """

    stage: Literal["prune_channels"] = "prune_channels"

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Remove channels in ``iterations`` steps; see ``ChannelPruner.run`` for the algorithm.

        Raises:
            PipelineInvalid: a pattern matches no module.
            StageFailed: the model cannot be traced, nothing can be removed, a target cannot be
                reached, or a setting requires data and there is none.
        """
        # Imported here, because settings are validated without loading torch.
        from compress.pruning.channel_pruner import ChannelPruner

        weights, edits, facts = ChannelPruner(self, model, context).run()
        lineage = self.lineage(model)
        return model.derive(context.root, weights, edits=edits, lineage=lineage, facts=facts)
