"""The server's half of a round: which replies count and how they move the global model."""
