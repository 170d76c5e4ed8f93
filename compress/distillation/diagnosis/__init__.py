"""Why a distilled model reaches less than a gate asks for."""
