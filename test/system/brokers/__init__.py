"""Real brokers on loopback for the tests, one module for each kind of destination, and what all kinds have to pass."""
