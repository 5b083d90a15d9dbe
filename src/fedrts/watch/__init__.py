"""A live page of a run: its report, who is connected, and who was rejected and why."""
