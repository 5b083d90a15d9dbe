"""A run and its folder: built from an experiment, written down, checkpointed, summed up."""
