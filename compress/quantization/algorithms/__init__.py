"""One module for each published method: AdaRound, AWQ, GPTQ, HQQ, SmoothQuant and others."""
