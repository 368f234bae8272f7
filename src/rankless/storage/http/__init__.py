"""Requests to object stores over HTTP: connections, repetitions, and what the clouds have in common."""
