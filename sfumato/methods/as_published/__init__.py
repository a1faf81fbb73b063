"""Published training loops that are not private, for comparison. Their certificates say `guarantee: none`."""
