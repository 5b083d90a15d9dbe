"""Looking at a finished run, and taking its model elsewhere."""
