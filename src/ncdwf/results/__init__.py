"""What came out: metrics, evaluation and run directories."""
