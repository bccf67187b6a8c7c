"""What others can take: forms of a trace that other tools read."""
