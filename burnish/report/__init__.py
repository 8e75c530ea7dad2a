"""A run's folder becomes one page that needs nothing else: curves, data, config, generations."""
