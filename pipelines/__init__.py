"""What can be run: one file a pipeline, composed of stages."""
