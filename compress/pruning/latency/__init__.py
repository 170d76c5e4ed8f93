"""Targets of latency: widths that lose least and reach a share of the latency where they serve."""
