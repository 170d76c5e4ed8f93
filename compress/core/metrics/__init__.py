"""Metrics by name: one number for a model on a split, and whether higher is better."""

from compress.core.metrics.metric import Metric, MetricMeter, default_metric, evaluate, metric_class

__all__ = ["Metric", "MetricMeter", "default_metric", "evaluate", "metric_class"]
