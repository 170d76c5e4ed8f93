"""Why a training reaches less than a gate asks for."""
