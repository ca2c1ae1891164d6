"""Benchmarks that need torch: `stoker bench offload`."""
