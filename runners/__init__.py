"""Where it runs, and the command line. The only rooms that know PipelineOptions."""
