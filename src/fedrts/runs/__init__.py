"""A run and its folder: built from an experiment, recorded, checkpointed and summarised."""
