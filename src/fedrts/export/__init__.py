"""Inspecting a finished run, and exporting its model."""
