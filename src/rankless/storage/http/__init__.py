"""Requests to object stores over HTTP: connections, repetitions, and common code for the clouds."""
