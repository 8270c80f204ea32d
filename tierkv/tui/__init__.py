"""The operator console: one frozen view of the cluster, drawn at most four times a second."""
