"""A live page of a run: its report, who is there, and who was rejected and why, following the run as it goes."""
