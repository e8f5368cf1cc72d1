"""What a device can afford, what a strategy costs, and which one is best (Sec. IV, V-A)."""
