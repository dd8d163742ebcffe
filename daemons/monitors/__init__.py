"""The daemon that passes the metrics of all runs on: to W&B, TensorBoard, trackio and one page for Prometheus."""
