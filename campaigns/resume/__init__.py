"""Exact resume: trainings that are killed or told to stop at random moments, and go on."""
