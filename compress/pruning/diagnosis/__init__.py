"""Why a pruned model loses accuracy: which channel groups, weights or blocks, for what reason."""
