"""What a run found, as data: measurements, report, comparison of runs."""
