"""What several campaigns use: jobs whose ranks can be killed, a state to save, moments of a save, tables."""
