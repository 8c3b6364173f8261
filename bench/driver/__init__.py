"""The benchmarks of retrysafe: one module for each idea; __main__ is what scripts/bench starts."""
