"""Single weights set to zero: masks, patterns, schedules."""
