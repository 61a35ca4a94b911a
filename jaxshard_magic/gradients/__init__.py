"""What happens inside a step's gradient call: accumulation, remat, precision."""
