"""Measuring: what a method costs (`flops`, `measure`) and how well it answers (`tasks`, `measure`)."""
