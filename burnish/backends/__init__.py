"""HOW the model is spread over devices."""
