"""Many runs side by side: comparisons, sweeps, the paper's tables."""
