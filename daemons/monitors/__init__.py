"""The daemon that passes the metrics of all runs on: to W&B, TensorBoard and one page for Prometheus."""
