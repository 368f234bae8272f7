"""Saves into real object stores whose ranks are killed and stopped, and whose connections break."""
