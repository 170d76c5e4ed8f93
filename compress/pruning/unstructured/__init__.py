"""Set single weights to zero: masks, layouts, schedules."""
