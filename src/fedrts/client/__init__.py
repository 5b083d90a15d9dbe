"""What one client does: it answers orders from its data, and keeps nothing between rounds."""
